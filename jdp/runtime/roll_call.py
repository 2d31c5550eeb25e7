"""Roll call: have all processes come, once each, before `jax.distributed` starts?

`jax.distributed.initialize` aborts the process when the coordinator cannot be reached,
a process is missing, or two claim one id. So the processes first meet at the same
address, see `roll_call_sockets`, and each gets an exception that says what is wrong.

Three lines per connection: process 0 sends a challenge, the process a hello, process 0
the verdict. Hello and verdict are signed with the key of the job, for this job,
challenge and process only. A job without a key signs with zeros.
"""

import os
import platform
import uuid
from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeVar

import jax
import msgspec

from jdp.replicas import wire
from jdp.runtime import job_key

T = TypeVar("T")

PROTOCOL = "jdp-roll-call-4"
MOST_HELLO_BYTES = 1 << 14
MOST_CHALLENGE_BYTES = 1 << 10
_NO_KEY = bytes(job_key.KEY_BYTES)  # signs if the job has no key.
_CODE_DIGITS = 2 * job_key.CODE_BYTES
_Text = Annotated[str, msgspec.Meta(max_length=512)]
# If they differ, processes get other dtypes, numbers or programs from the same code.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class RollCallRefused(Exception):
    """A line does not belong to a roll call; the text says why."""


class Challenge(msgspec.Struct, frozen=True):
    """The first message of process 0, different on each connection."""

    protocol: _Text
    nonce: _Hex
    key_id: _Text  # equal if and only if the keys are; "" without a key.
    job: _Text = ""  # see `job_key.name_job`; several jobs may have one key.


class RollCallHello(msgspec.Struct, frozen=True):
    """The introduction of a process."""

    protocol: _Text
    process_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    num_processes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    instance: _Hex  # unique to this start of the process.
    host: _Text  # name of the machine, for errors.
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    node: _Text  # equal for processes of one machine.
    jax_version: _Text
    settings: dict[_Text, _Text] = {}  # settings of JAX, by name; see `_SETTINGS`.


class RollCallVerdict(msgspec.Struct, frozen=True):
    """The end of the roll call: an error for all, or the world of the processes."""

    error: str | None = None
    missing: int | None = None  # a process that did not come in time.
    nodes: list[str] = []  # by process id; equal for processes of one machine.
    host: str = ""  # address at which peers on other hosts reach process 0.
    session: str = ""  # input of the key of this run; 32 hexadecimal digits.
    path: str = ""  # Unix socket for JAX's coordination service, if not a port.


class Meeting(NamedTuple):
    """The result of the roll call for one process."""

    nodes: list[str]  # by process id; equal for processes of one machine.
    host: str  # numeric address of process 0, as this process reaches it.
    own_host: str  # numeric address of this process, as the others reach it.
    bind_host: str  # process 0: where to listen for the others; "": everywhere.
    session_key: bytes  # key of this run, shape (32,), the same everywhere.
    path: str = ""  # the Unix socket that process 0 offers to the others.


class RollCall(NamedTuple):
    """The processes that have come so far."""

    num_processes: int
    deadline_s: float
    present: Mapping[int, RollCallHello]  # by process id.
    error: str | None = None


def open_roll(own: RollCallHello, *, deadline_s: float) -> RollCall:
    """Starts a roll call at process 0."""
    return RollCall(own.num_processes, deadline_s, {own.process_id: own})


def receive(roll: RollCall, hello: RollCallHello) -> RollCall:
    """Enters `hello`; pure. A repeated message of one process changes nothing."""
    known = roll.present.get(hello.process_id)
    if roll.error or (known and known.instance == hello.instance):
        return roll
    reference = roll.present[0]
    error = None
    if hello.num_processes != roll.num_processes:
        error = (
            f"`num_processes` is {roll.num_processes} in process 0 "
            f"({_where(reference)}) and {hello.num_processes} in process "
            f"{hello.process_id} ({_where(hello)}). Start all with the same number."
        )
    elif not 0 <= hello.process_id < roll.num_processes:
        error = (
            f"`process_id` must be below {roll.num_processes}, got "
            f"{hello.process_id} ({_where(hello)})."
        )
    elif known:
        error = (
            f"`process_id={hello.process_id}` was given twice: {_where(known)} and "
            f"{_where(hello)}. Give each process its own."
        )
    elif hello.jax_version != reference.jax_version:
        error = (
            f"jax is {reference.jax_version} in process 0 ({_where(reference)}) and "
            f"{hello.jax_version} in process {hello.process_id} ({_where(hello)}). "
            "Install the same version everywhere."
        )
    else:
        error = _compare_settings(reference, hello)
    if error:
        return roll._replace(error=error)
    return roll._replace(present={**roll.present, hello.process_id: hello})


def _compare_settings(reference: RollCallHello, hello: RollCallHello) -> str | None:
    for name, value in reference.settings.items():
        theirs = hello.settings.get(name)
        if theirs != value:
            return (
                f"`{name}` is {value} in process 0 ({_where(reference)}) and {theirs} "
                f"in process {hello.process_id} ({_where(hello)}). Set it alike "
                f"everywhere, before `jdp.init`: by the environment, `{name.upper()}`, "
                f'or with `jax.config.update("{name}", ...)`.'
            )
    return None


def forget(roll: RollCall, hello: RollCallHello) -> RollCall:
    """Removes a process that left before the end; pure. It may come again."""
    if roll.error or roll.present.get(hello.process_id) != hello:
        return roll
    present = {i: known for i, known in roll.present.items() if known != hello}
    return roll._replace(present=present)


def judge(roll: RollCall, *, now_s: float) -> RollCallVerdict | None:
    """Returns the verdict, or None while processes may still come; pure."""
    if roll.error:
        return RollCallVerdict(error=roll.error)
    missing = [i for i in range(roll.num_processes) if i not in roll.present]
    if not missing:
        return RollCallVerdict(
            nodes=[roll.present[i].node for i in range(roll.num_processes)]
        )
    if now_s < roll.deadline_s:
        return None
    shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return RollCallVerdict(
        error=f"{len(missing)} of {roll.num_processes} processes did not come in time: "
        f"{shown}. Look at their logs, and at whether they can reach the coordinator.",
        missing=missing[0],
    )


def make_hello(
    process_id: int, num_processes: int, *, node: str | None
) -> RollCallHello:
    """Describes this process; `node` overrides the name of its machine."""
    return RollCallHello(
        protocol=PROTOCOL,
        process_id=process_id,
        num_processes=num_processes,
        instance=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        node=node or _machine(),
        jax_version=jax.__version__,
        settings={name: str(getattr(jax.config, name)) for name in _SETTINGS},
    )


def make_challenge(key: bytes | None, job: str = "") -> Challenge:
    """Returns a new challenge of process 0, for this key and job."""
    return Challenge(PROTOCOL, uuid.uuid4().hex, key_id(key), job)


def key_id(key: bytes | None) -> str:
    """Returns an id that tells keys apart without showing them; "" for None."""
    return "" if key is None else job_key.derive(key, "roll call key id")[:8].hex()


def session_key(key: bytes | None, session: str) -> bytes:
    """Returns the key that signs messages between processes of this run.

    If the job has no key, a listener at the roll call can derive it too; it still keeps
    out later strangers.
    """
    return job_key.derive(key or _NO_KEY, f"roll call session {session}")


def encode_challenge(challenge: Challenge) -> bytes:
    """Encodes `challenge` as a line."""
    return msgspec.json.encode(challenge) + b"\n"


def decode_challenge(line: bytes) -> Challenge:
    """Inverts `encode_challenge`.

    Raises:
      RollCallRefused: the line is not a challenge.
    """
    challenge = _decode(line, Challenge, "challenge")
    _check_texts(challenge.protocol, challenge.key_id, challenge.job)
    if challenge.protocol != PROTOCOL:
        raise RollCallRefused(f"it speaks {challenge.protocol}, not {PROTOCOL}")
    return challenge


def encode_hello(
    hello: RollCallHello, challenge: Challenge, key: bytes | None
) -> bytes:
    """Encodes `hello` as a line that answers `challenge`."""
    return _sign(key, _hello_context(challenge), msgspec.json.encode(hello))


def decode_hello(line: bytes, challenge: Challenge, key: bytes | None) -> RollCallHello:
    """Inverts `encode_hello`.

    Raises:
      RollCallRefused: the line is not a hello, or does not prove the key for this
        challenge.
    """
    hello = _decode(
        _verify(key, _hello_context(challenge), line), RollCallHello, "hello"
    )
    _check_texts(hello.protocol, hello.host, hello.node, hello.jax_version)
    _check_texts(*hello.settings, *hello.settings.values())
    if hello.protocol != PROTOCOL:
        raise RollCallRefused(f"it speaks {hello.protocol}, not {PROTOCOL}")
    if hello.process_id >= hello.num_processes:
        raise RollCallRefused("its `process_id` is not below its `num_processes`")
    return hello


def encode_verdict(
    verdict: RollCallVerdict, challenge: Challenge, instance: str, key: bytes | None
) -> bytes:
    """Encodes `verdict` as a line for the process with this `instance`."""
    context = _verdict_context(challenge, instance)
    return _sign(key, context, msgspec.json.encode(verdict))


def decode_verdict(
    line: bytes, challenge: Challenge, own: RollCallHello, key: bytes | None
) -> RollCallVerdict:
    """Inverts `encode_verdict`.

    Raises:
      RollCallRefused: the line is not a verdict, does not prove the key, or is for
        another process or an earlier run.
    """
    context = _verdict_context(challenge, own.instance)
    verdict = _decode(_verify(key, context, line), RollCallVerdict, "verdict")
    if verdict.error is not None:
        if not verdict.error.replace("\n", "").isprintable():
            raise RollCallRefused("its error is not printable text")
        return verdict
    _check_texts(verdict.host, verdict.session, verdict.path, *verdict.nodes)
    if len(verdict.nodes) != own.num_processes or not verdict.host:
        raise RollCallRefused("it does not name the machine of each process")
    return verdict


def _hello_context(challenge: Challenge) -> str:
    return f"roll call hello {challenge.nonce} {challenge.job}"


def _verdict_context(challenge: Challenge, instance: str) -> str:
    return f"roll call verdict {challenge.nonce} {instance} {challenge.job}"


def _sign(key: bytes | None, context: str, body: bytes) -> bytes:
    signed = job_key.sign(key or _NO_KEY, context, body)
    code = signed[: job_key.CODE_BYTES].hex().encode()
    return code + signed[job_key.CODE_BYTES :] + b"\n"


def _verify(key: bytes | None, context: str, line: bytes) -> bytes:
    try:
        code = bytes.fromhex(line[:_CODE_DIGITS].decode("ascii"))
    except ValueError:
        code = b""
    if len(code) != job_key.CODE_BYTES:
        raise RollCallRefused("it is not signed")
    body = line[_CODE_DIGITS:].removesuffix(b"\n")
    try:
        return job_key.verify(key or _NO_KEY, context, code + body)
    except job_key.WrongKey:
        raise RollCallRefused(
            "it does not prove the key of this job; give all the same `--key-file` or "
            "`JDP_JOB_KEY`"
        ) from None


def _decode(line: bytes, kind: type[T], name: str) -> T:
    try:
        return wire.decode_with(msgspec.json.Decoder(kind).decode, line)
    except wire.DecodeError as error:
        raise RollCallRefused(f"it is not a valid {name}: {error}") from None


def _check_texts(*texts: str) -> None:
    # They are shown in errors: control codes of terminals are refused.
    if not all(text.isprintable() for text in texts):
        raise RollCallRefused("it holds unprintable text")


def _where(hello: RollCallHello) -> str:
    return f"{hello.host}, pid {hello.pid}"


def _machine() -> str:
    """Names this machine; the boot id tells apart machines with one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{platform.node()}/{file.read().strip()}"
    except OSError:
        return platform.node()
