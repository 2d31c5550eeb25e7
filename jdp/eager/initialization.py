"""Initialization: start the engine and the process sets it begins with."""

from collections.abc import Iterable, Sequence

from jdp.eager import process_set, session
from jdp.eager.options import EagerOptions
from jdp.eager.process_set import ProcessSet
from jdp.replicas import mesh
from jdp.replicas.mesh import World


def init(
    world: World | None = None,
    options: EagerOptions | None = None,
    *,
    process_sets: Sequence[ProcessSet | Iterable[int]] = (),
) -> None:
    """Starts the eager engine; every process of the world calls it.

    If the engine runs already, `init` only adds the process sets that do not exist. An
    engine that has ended on all processes is started again.

    Args:
      world: the processes; None: the world of `jdp.init`.
      options: the same on all processes; None: read from the variables
        `JDP_EAGER_...`, or kept if the engine runs.
      process_sets: sets to add, as by `add_process_set`; the same on all processes.

    Raises:
      RuntimeError: there is no world, this process was forked from a process of a job,
        or the engine runs with another world or other options. On every process, if
        one did not come within `world.timeout_s` or has other options or process sets.
      ValueError: two of `process_sets` have the same ranks, or one has all ranks, or a
        rank is not in this job. The engine does not run then.
      TypeError: `world` or `options` is of another type.
    """
    if world is not None:
        mesh.check_world(world)
    if not (options is None or isinstance(options, EagerOptions)):
        raise TypeError(
            "`options` must be `jdp.eager.EagerOptions(...)`, got "
            f"{type(options).__name__}."
        )
    runs_already = session.is_running()
    engine = session.start(world, options)
    try:
        added: set[tuple[int, ...]] = set()
        for given in process_sets:
            one = given if isinstance(given, ProcessSet) else ProcessSet(given)
            known = {ranks: i for i, ranks in engine.executor.known_sets.items()}
            if runs_already and one.ranks in known and one.ranks not in added:
                one.process_set_id = known[one.ranks]
            else:
                process_set.add_process_set(one)
            added.add(one.ranks)
    except BaseException:
        if not runs_already:
            session.shutdown()
        raise
