"""Beginning: the engine, with the process sets that are there from the start."""

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

    Where the engine runs already, only process sets that are not there are added. One
    that has ended, on all processes, is started again.

    Args:
      world: the processes; by default what `jdp.init` made.
      options: the same on all processes; None: from the variables `JDP_EAGER_...`, or
        those of the engine that runs.
      process_sets: sets to add, as `add_process_set` does; the same on all processes.

    Raises:
      RuntimeError: there is no world, this process was forked from a process of a
        job, the engine runs with another world or other options, a process
        did not come within `world.timeout_s`, or has other options or process sets;
        the last three on every process.
      ValueError: two of `process_sets` are the same, or one is that of all processes,
        or has a rank that is none of this job. The engine does not run then.
      TypeError: `world` or `options` is something else.
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
