"""Types: aliases and contracts shared by all of jdp, and checks of option types."""

import dataclasses
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
# A leaf on the host, which becomes a `jax.Array`; integers and booleans are `complex`
# to type checkers.
HostLeaf = np.ndarray | np.generic | complex
AxisName = str | tuple[str, ...]
Device = Any  # jax.Device, which type checkers do not take for a type.

_NO_AXIS_NAME = (
    "`axis_name` must be one name or a pair of names (across nodes, within a node), "
    "got {!r}."
)


class AllReduceFn(Protocol):
    """Function that sums a flat buffer over the replicas, such as `jax.lax.psum`."""

    def __call__(self, x: jax.Array, axis_name: AxisName, /) -> jax.Array:
        """Returns the sum of `x`, shape (n,), over `axis_name`."""
        ...


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Sum of flat buffers over the replicas, inside a traced function.

    Every replica of the axis makes the same calls in the same order, with the same
    shapes and dtypes, and gets bitwise the same result. Where only `reduce` is needed,
    `all_reduce=` also takes that function. Results have the shapes and dtypes of the
    arguments, which is checked while a program is traced.

    Attributes:
      reduce: `reduce(x, axis_name)` returns the sum of `x`, shape (n,), over the axis.
      reduce_group: `reduce_group(arrays, axis_name, has_data=...)` returns the sums of
        arrays of one dtype and any shapes, a list, in one call, without packing them. A
        replica counts as zeros where `has_data`, None or bool (), is False. None: jdp
        packs the arrays into one buffer and calls `reduce`. A hook, whose buffers are
        packed, always calls `reduce`.
      choose: `choose(buffer, axis_name)` returns the `AllReduce` for one buffer, a
        `jax.ShapeDtypeStruct`, while a program is traced, or anything else that
        `all_reduce=` takes except None. The fields of the result are used, except its
        `choose`. None: this one.
      takes_scale: whether `reduce` takes `scale=`, a number or float32 (), and
        multiplies the sum by it before rounding.
      bucket_bytes: size of the buckets in which `jdp.value_and_grad` reduces gradients
        of at least eight such buckets, where the user has no plan; None: the default of
        `jdp.plan_buckets`.
      name: label in `jdp.describe`.
    """

    reduce: Callable[..., jax.Array]
    reduce_group: Callable[..., list[jax.Array]] | None = None
    choose: "Callable[[jax.ShapeDtypeStruct, AxisName], AllReduce] | None" = None
    takes_scale: bool = False
    bucket_bytes: int | None = None
    name: str = "custom"


AxisOption = AxisName  # the values of an option `axis_name`.
AllReduceOption = AllReduce | AllReduceFn | Literal["auto"] | None


class Store(Protocol):
    """Small values that the processes of a job share on the host, by key."""

    def next_round(self) -> int:
        """Returns 0, 1, 2, ...: the number of earlier calls on this process."""
        ...

    def set(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """Publishes `value`; without `overwrite` a key is set once."""
        ...

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """Waits for `key` and returns its value.

        Raises:
          TimeoutError: the key was not set within `timeout_s` seconds.
        """
        ...

    def try_get(self, key: str) -> bytes | None:
        """Returns the value of `key`, or None while it is not set."""
        ...

    def list_directory(self, directory: str) -> dict[str, bytes]:
        """Returns the values under `directory`, by the key after `<directory>/`."""
        ...

    def delete(self, key: str) -> None:
        """Deletes `key`, and everything under it if it is a directory."""
        ...

    def derive_secret(self, context: str) -> bytes:
        """Returns a secret of the job for one use, shape (32,).

        It is equal on all processes, and is not in the store.
        """
        ...

    def retire(self, directory: str) -> None:
        """Marks a directory for deletion once no process can still read it."""
        ...

    def take_retired(self, under: str = "") -> list[str]:
        """Returns the directories that this process has retired, each once.

        Args:
          under: the beginning of their names.
        """
        ...


def as_axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Returns one axis name, or several, as a tuple.

    Raises:
      ValueError: there is no name, or a name is not a string or occurs twice.
    """
    if isinstance(axis_name, str):
        axis_name = (axis_name,)
    names = tuple(axis_name) if isinstance(axis_name, Iterable) else ()
    are_texts = all(isinstance(name, str) and name for name in names)
    if not names or not are_texts or len(set(names)) != len(names):
        raise ValueError(_NO_AXIS_NAME.format(axis_name))
    return names


def check_axis_name(axis_name: AxisName) -> None:
    """Raises ValueError unless `axis_name` is one name or a pair of names."""
    if len(as_axis_names(axis_name)) > 2:
        raise ValueError(_NO_AXIS_NAME.format(axis_name))


def check_flags(**flags: Any) -> None:
    """Raises TypeError for an option that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def as_count(value: Any, name: str, *, least: int) -> int:
    """Returns an option that is a count.

    Args:
      value: the value that was passed.
      name: name of the option.
      least: smallest valid value.

    Raises:
      TypeError: it is not an integer.
      ValueError: it is below `least`.
    """
    count = as_integer(value, name)
    if count < least:
        raise ValueError(f"`{name}` must be at least {least}, got {count}.")
    return count


def as_integer(value: Any, name: str) -> int:
    """Returns an option that is an integer, or raises TypeError."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"`{name}` must be an integer, got {value!r}.")


def check_number(value: Any, name: str) -> None:
    """Raises TypeError if an option is not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")


def as_floating(dtype: Any, name: str) -> Any:
    """Returns an option that is a floating dtype.

    Raises:
      TypeError: it is not a floating dtype.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"`{name}` must be a floating dtype, got "
            f"{repr(dtype) if found is None else found}. Pass one such as "
            "`jnp.bfloat16`."
        )
    return found
