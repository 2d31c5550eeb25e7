import dataclasses

import pytest

from jdp.runtime import environment, guard

PLACE = environment.LaunchEnvironment(
    coordinator_address="10.0.0.1:29500",
    num_processes=4,
    process_id=3,
    local_process_id=1,
    num_local_processes=2,
    node_rank=1,
    devices_per_process=8,
)


@pytest.mark.parametrize("devices_per_process", [None, 8])
def test_from_environ_inverts_to_environ(devices_per_process):
    place = dataclasses.replace(PLACE, devices_per_process=devices_per_process)
    assert environment.LaunchEnvironment.from_environ(place.to_environ()) == place


def test_no_variables_mean_no_launcher():
    assert environment.LaunchEnvironment.from_environ({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    "name", sorted(set(PLACE.to_environ()) - {environment.DEVICES_PER_PROCESS})
)
def test_a_missing_variable_is_named(name):
    environ = PLACE.to_environ()
    del environ[name]
    with pytest.raises(ValueError, match=rf"but \['{name}'\] are not"):
        environment.LaunchEnvironment.from_environ(environ)


def test_a_variable_that_is_no_number_is_named():
    environ = PLACE.to_environ() | {environment.NODE_RANK: "one"}
    with pytest.raises(ValueError, match="`JDP_NODE_RANK` must be a whole number"):
        environment.LaunchEnvironment.from_environ(environ)


def test_variables_lists_every_variable():
    names = {
        value
        for value in vars(environment).values()
        if isinstance(value, str) and value.startswith("JDP_")
    }
    # The name of a job is the user's, so a launcher hands it on as it is.
    assert {*environment.VARIABLES, environment.JOB_ID} == names
    beside = {environment.LAUNCH_ID, environment.LAUNCH_FOLDER}
    beside |= {environment.JOB_KEY, environment.JOB_ID}
    assert set(PLACE.to_environ()) | beside == names


def test_the_guard_looks_for_the_launch_id():
    assert guard._LAUNCH_ID == environment.LAUNCH_ID
