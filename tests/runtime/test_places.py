"""Places of processes that torchrun, MPI or Slurm started, by their environment."""

import warnings

import pytest

from jdp.runtime import launchers, places

_LAUNCHED = {
    "torchrun": {
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    },
    "Open MPI": {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-a-77@1",
    },
    "MVAPICH": {
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_RANK": "3",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MPICH": {
        "PMI_SIZE": "4",
        "PMI_RANK": "3",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
    },
}
_LOCAL_COUNTS = {
    "torchrun": "LOCAL_WORLD_SIZE",
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MVAPICH": "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPICH": "MPI_LOCALNRANKS",
}
_RANKS = {
    "torchrun": "RANK",
    "Open MPI": "OMPI_COMM_WORLD_RANK",
    "MVAPICH": "MV2_COMM_WORLD_RANK",
    "MPICH": "PMI_RANK",
}
_SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
_ONE_OF_ONE = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def _find(environ, **options):
    return places.find(places.PlaceOptions(timeout_s=1.0, **options), environ)


@pytest.mark.parametrize("name", _LAUNCHED)
def test_a_process_of_a_launcher_takes_its_place(name):
    environ = _LAUNCHED[name] | {launchers.COORDINATOR_ADDRESS: "10.0.0.7:8000"}
    found = _find(environ)
    assert found == places.ProcessPlace(
        coordinator_address="10.0.0.7:8000",
        num_processes=4,
        process_id=3,
        local_device_ids=(1,),  # One process per GPU.
    )
    # Slurm, in a task of which the launcher was started, does not count.
    assert _find(environ | _SLURM) == found
    # The program may choose, too.
    given = _find(_LAUNCHED[name], coordinator_address="10.0.0.7:8000")
    assert given == found
    assert _find(environ, local_device_ids=(0, 2)).local_device_ids == (0, 2)


@pytest.mark.parametrize("name", _LAUNCHED)
def test_processes_of_one_host_meet_there(name):
    found = set()
    for rank in range(4):
        changed = {_RANKS[name]: str(rank), _LOCAL_COUNTS[name]: "4"}
        environ = _LAUNCHED[name] | changed
        place = launchers.find(environ, find_starter=lambda: "77 0.5")
        assert place is not None and place.process_id == rank
        found.add(place.coordinator_address)
    (address,) = found
    host, port = address.split(":")
    assert host == "127.0.0.1"
    # torchrun gives a port; the others choose by the name of the job.
    assert port == "29500" if name == "torchrun" else 61440 <= int(port) < 65536


def test_jobs_of_one_host_choose_ports_of_their_own():
    environ = _LAUNCHED["MPICH"] | {"MPI_LOCALNRANKS": "4"}
    first, second = (
        launchers.find(environ, find_starter=lambda name=name: name)
        for name in ("77 0.5", "78 0.5")
    )
    assert first is not None and second is not None
    assert first.coordinator_address != second.coordinator_address


def test_the_port_where_torchrun_listens_is_not_taken():
    environ = _LAUNCHED["torchrun"] | {"TORCHELASTIC_RUN_ID": "none"}
    first = _find(environ | {"TORCHELASTIC_RESTART_COUNT": "0"})
    again = _find(environ | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert first.coordinator_address.startswith("10.0.0.1:")
    assert not first.coordinator_address.endswith(":29500")
    assert first.coordinator_address != again.coordinator_address
    chosen = _find(environ | {launchers.COORDINATOR_PORT: "8000"})
    assert chosen.coordinator_address == "10.0.0.1:8000"


@pytest.mark.parametrize("name", sorted({*_LAUNCHED} - {"torchrun"}))
def test_processes_of_several_hosts_need_an_address(name):
    with pytest.raises(ValueError, match=f"of {name}, whose variables do not tell"):
        _find(_LAUNCHED[name])


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"RANK": "4"}, "`RANK=4` must be from 0 to 3, for `WORLD_SIZE=4` of torchrun"),
        ({"WORLD_SIZE": "x"}, "`WORLD_SIZE` must be a number, .* got 'x'"),
        ({"LOCAL_RANK": "-1"}, "`LOCAL_RANK` must be a number, .* got '-1'"),
        ({"MASTER_PORT": "http"}, "must be a number, got 'http', by `JAX_.*_PORT`"),
    ],
)
def test_garbage_of_a_launcher_is_named(changed, text):
    with pytest.raises(ValueError, match=text):
        _find(_LAUNCHED["torchrun"] | changed)


def test_a_process_that_its_launcher_started_alone_is_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _find(_ONE_OF_ONE) is None


def test_a_process_alone_in_a_task_of_several_does_not_train_alone_without_a_word():
    # `srun -n4 torchrun --nproc-per-node 1`.
    with pytest.warns(UserWarning, match="`SLURM_NTASKS='4'` says") as caught:
        assert _find(_ONE_OF_ONE | _SLURM) is None
    assert len(caught) == 1
    # `mpiexec -n 2 torchrun --nproc-per-node 1`.
    with pytest.raises(ValueError, match="one of several, by `PMI_SIZE='2'`"):
        _find(_ONE_OF_ONE | {"PMI_SIZE": "2", "PMI_RANK": "1"})


def test_the_warning_shows_the_line_that_calls_init():
    def init():
        return _find({"SLURM_NTASKS": "4"})

    with pytest.warns(UserWarning, match="trains alone") as caught:
        init()
    # `_find` is one call further from `places.find` than `jdp.init` is.
    assert caught[0].filename == __file__
    assert caught[0].lineno == init.__code__.co_firstlineno + 1
