import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from jdp.launch import launch, launcher_link
from jdp.launch.endings import Exit
from jdp.replicas import wire
from tests import harness, rarely

KEY = bytes(range(32))
TIMEOUT_S = 30.0


def find_port():
    """Returns a port that is free, and the next one too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def wait_for(link, count=1):
    deadline_s = time.monotonic() + TIMEOUT_S
    found = []
    while len(found) < count:
        assert time.monotonic() < deadline_s, found
        found += link.take()
        time.sleep(0.01)
    return found


@pytest.fixture
def links():
    address = f"127.0.0.1:{find_port()}"
    made = [
        launcher_link.LauncherLink(i, 3, address=address, key=KEY) for i in range(3)
    ]
    for link in made:
        assert link._star.wait_until_whole(timeout_s=TIMEOUT_S)
    yield made
    for link in made:
        link.close()


def test_all_launchers_hear_of_a_failure_with_its_host(links):
    links[1].say(Exit(3, 7, failed_at_s=1.0))
    links[1].say(Exit(3, 7, failed_at_s=1.0))
    before_s = time.monotonic()
    for link in (links[0], links[2]):
        (end,) = wait_for(link)
        assert end[:2] == (3, 7) and end.node == 1
        assert before_s - 1.0 < end.failed_at_s <= time.monotonic()
    links[0].say(end)  # What came from another host is not sent on.
    links[1].say(Exit(2, 0))
    links[0].say(Exit(0, -signal.SIGKILL))
    assert wait_for(links[1]) == [Exit(0, -signal.SIGKILL, node=0)]


def test_a_second_launcher_of_a_node_is_told(links):
    host, port = links[1]._star._address
    second = launcher_link.LauncherLink(1, 3, address=f"{host}:{port - 1}", key=KEY)
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (refusals := second.take_refusals()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert refusals == [
            "the launcher of node 0 at 127.0.0.1 was refused: it has another node 1; "
            "`--node-rank` must be another one on each host"
        ]
        assert not links[0].take()
        links[0].say(Exit(0, 3))
        assert wait_for(links[1]) == [Exit(0, 3, node=0)]
    finally:
        second.close()


def test_a_process_that_ended_before_init_is_told_of_apart_from_failures(links):
    links[1].say_absent(5)
    links[1].say_absent(5)
    links[1].say(Exit(3, 7))  # It is heard after that.
    for link in (links[0], links[2]):
        assert [end.process_id for end in wait_for(link)] == [3]
        assert list(link.take_absent()) == [5]
    assert not links[1].take_absent()


@pytest.mark.parametrize(
    "end", [Exit(-1, 0), Exit(1, 0, 1.0), Exit(1, 0, None, 2), Exit(1, 0, note="why")]
)
def test_an_end_that_cannot_be_is_refused(end):
    with pytest.raises(wire.DecodeError):
        launcher_link.check(end)


def test_a_launcher_that_is_gone_is_told_of_and_one_that_leaves_is_not(links):
    links.pop().close()
    for sock in list(links[1]._star._lines):
        sock.shutdown(socket.SHUT_RDWR)
    (end,) = wait_for(links[0])
    assert (end.process_id, end.node) == (-1, 1)
    assert "the launcher of node 1 is gone" in end.note


PROGRAM = """
import os, sys, time
print("ready", flush=True)
if os.environ["JDP_PROCESS_ID"] == "CULPRIT":
    time.sleep(0.5)
    FAULT
time.sleep(100)
"""


def start(tmp_path, node, port, *options, environ):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "jdp.cli.main", "launch", "-n", "1"),
            *("--nodes", "2", "--node-rank", str(node), "--grace-s", "1"),
            *("--coordinator", f"127.0.0.1:{port}", *options, "program.py"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": harness.python_path()} | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def two_hosts(tmp_path):
    """Starts two launchers, each for a host of its own; only the machine is one."""
    (tmp_path / "key").write_text("k" * 64)
    os.chmod(tmp_path / "key", 0o600)
    started = []

    def make(program, *options, each=((), ()), environs=({}, {})):
        (tmp_path / "program.py").write_text(program)
        port = find_port()
        for node in range(2):
            own = (*options, *each[node])
            started.append(start(tmp_path, node, port, *own, environ=environs[node]))
        return started

    yield make
    for launcher in started:
        launcher.kill()
        launcher.communicate()


ABSENT = """
import os, sys
if os.environ["JDP_PROCESS_ID"] == "CULPRIT":
    import time
    time.sleep(3)  # The launchers are linked.
    sys.exit(0)
import jdp
jdp.init(timeout_s=100)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.slow
def test_an_end_before_init_on_another_host_is_not_waited_for(two_hosts, process):
    start_s = time.monotonic()
    launchers = two_hosts(ABSENT.replace("CULPRIT", str(process)), "--key-file", "key")
    _, said = launchers[1 - process].communicate(timeout=90)
    assert time.monotonic() - start_s < 80
    assert launchers[1 - process].returncode == 1
    text = f"process {process} ended with exit code 0 before it had joined the job"
    assert text in said, said


SILENT = """
import os
import jdp
world = jdp.init(timeout_s=100)
world.store.set(f"here/{world.process_index}", b"", overwrite=True)
world.store.get(f"here/{1 - world.process_index}", timeout_s=60)
if world.process_index == 0:
    os._exit(0)
import time
time.sleep(60)
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_all_hosts_say_that_the_job_failed_where_a_silent_end_broke_it(two_hosts):
    launchers = two_hosts(SILENT, "--key-file", "key")
    said = [launcher.communicate(timeout=90)[1] for launcher in launchers]
    assert launchers[0].returncode == 1
    assert launchers[1].returncode not in (0, None)
    text = "process 0 ended with exit code 0, but without its exit handlers"
    assert text in said[0], said


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "text", "code"),
    rarely.cases(
        [
            ("sys.exit(3)", "failed with exit code 3", 3),
            ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", 137),
        ],
        often=[("os.kill(os.getpid(), 9)", "was killed by SIGKILL", 137)],
    ),
)
@pytest.mark.parametrize("process", rarely.cases([0, 1], often=(1,)))
def test_a_failure_before_the_first_step_is_named_on_all_hosts(
    two_hosts, fault, text, code, process
):
    program = PROGRAM.replace("CULPRIT", str(process)).replace("FAULT", fault)
    launchers = two_hosts(program, "--key-file", "key")
    said = [launcher.communicate(timeout=60)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [code, code]
    assert f"jdp launch: process {process} {text}." in said[process]
    assert (
        f"jdp launch: process {process} on node {process} {text}."
        in (said[1 - process])
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("early", [0, 1])
def test_a_host_that_comes_later_hears_of_a_failure(tmp_path, early):
    (tmp_path / "late.py").write_text("import time; time.sleep(60)")
    port = find_port()
    says = [tmp_path / f"says{node}" for node in range(2)]
    for each in says:
        each.touch()

    def run(world):
        node = world.process_index
        options = launch.LaunchOptions(
            num_processes=1,
            num_nodes=2,
            node_rank=node,
            coordinator_address=f"127.0.0.1:{port}",
            key=KEY,
        )
        target = "not there.py" if node == early else str(tmp_path / "late.py")
        command = launch.Command(kind="script", target=target, is_checked=False)
        while node != early and "hosts have come" not in says[early].read_text():
            time.sleep(0.1)
        with open(says[node], "wb") as out:
            fds = {"stdout_fd": out.fileno(), "stderr_fd": out.fileno()}
            return launch.launch(command, options, **fds)

    assert harness.run_threads(run, 2, timeout_s=60.0) == [1, 1]
    text = f"process {early} on node {early} failed with exit code 1."
    assert text in says[1 - early].read_text()


@pytest.mark.multiprocess
def test_a_launcher_that_is_killed_ends_the_other(two_hosts):
    launchers = two_hosts(PROGRAM, "--key-file", "key")
    for launcher in launchers:
        assert launcher.stdout.readline().endswith("ready\n")
    time.sleep(0.5)  # For the link.
    launchers[0].kill()
    start_s = time.monotonic()
    _, said = launchers[1].communicate(timeout=60)
    assert time.monotonic() - start_s < 10
    assert launchers[1].returncode == 1
    assert "jdp launch: the launcher of node 0 is gone" in said


@pytest.mark.multiprocess
@pytest.mark.parametrize("node", rarely.cases([0, 1], often=(1,)))
@pytest.mark.parametrize(
    ("options", "text"),
    rarely.cases(
        [
            (["--log-dir", "program.py"], "--log-dir 'program.py' cannot be written"),
            (["--grace-s", "-1"], "--grace-s must be a number of seconds"),
            (["--devices-per-process", "0"], "--devices-per-process must be at least"),
        ],
        often=[(["--grace-s", "-1"], "--grace-s must be a number of seconds")],
    ),
)
def test_a_launcher_that_fails_ends_the_other_at_once(two_hosts, node, options, text):
    each: list[list[str]] = [[], []]
    each[node] = options
    start_s = time.monotonic()
    launchers = two_hosts(PROGRAM, "--key-file", "key", each=each)
    said = [launcher.communicate(timeout=90)[1] for launcher in launchers]
    assert time.monotonic() - start_s < 3.0 + 10.0  # Two launchers start meanwhile.
    assert f"jdp launch: the launcher of node {node} failed: {text}" in said[1 - node]
    assert launchers[1 - node].returncode == 1
    assert launchers[node].returncode in (1, 2) and text in said[node]


@pytest.mark.multiprocess
@pytest.mark.parametrize("differs", rarely.cases(["key", "job"], often=("job",)))
def test_both_launchers_name_another_key_or_job_at_once(two_hosts, tmp_path, differs):
    (tmp_path / "key1").write_text("K" * 64)
    os.chmod(tmp_path / "key1", 0o600)
    keys = [["--key-file", "key"], ["--key-file", "key1"]]
    environs = [{}, {}]
    if differs == "job":
        keys[1], environs[1] = keys[0], {"JDP_JOB_ID": "second"}
    launchers = two_hosts(PROGRAM, each=keys, environs=environs)
    expected = {
        "key": "it has another key than this end; give `--key-file`",
        "job": "it is of another job with the same key; `--nodes`, `--coordinator`",
    }[differs]
    names = ("a launcher at 127.0.0.1", "the launcher of node 0 at 127.0.0.1")
    for launcher, name in zip(launchers, names, strict=True):
        assert launcher.stderr.readline().startswith(
            f"jdp launch: {name} was refused: {expected}"
        )
    time.sleep(0.5)
    for launcher in launchers:  # A stranger could have said it.
        assert launcher.poll() is None
        launcher.terminate()
        assert "was refused" not in launcher.communicate(timeout=60)[1]


@pytest.mark.multiprocess
def test_without_a_key_one_line_says_that_there_is_no_link(two_hosts):
    launchers = two_hosts("print('ready')")
    for launcher in launchers:
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == 0
        assert re.fullmatch(
            r"jdp launch: the launchers of the hosts are not linked, because there is "
            r"no `--key-file`.*\n",
            said,
        )


def test_launchers_of_two_jobs_with_one_key_do_not_meet():
    address = f"127.0.0.1:{find_port()}"
    args = dict(address=address, key=KEY)
    made = [launcher_link.LauncherLink(i, 2, job=f"j{i}", **args) for i in range(2)]
    assert not made[1]._star.wait_until_whole(timeout_s=1.0)
    made[1].say(Exit(0, 1))
    assert not made[0]._star.wait_until_whole(timeout_s=0.2) and not made[0].take()
    for link in made:
        link.close()
