"""The contract: `__all__`, signatures, docstrings."""

import inspect

import pytest

import jdp

SIGNATURES = {
    "accumulate_gradients": "(loss_fn, num_micro_batches, *, has_aux, find_unused, "
    "dtype, weight, divide_by, axis_name, plan, packing, all_reduce)",
    "average": "(tree, *, weight, divide_by, axis_name)",
    "check_replicas": "(tree, *, world)",
    "check_same_program": "(fn, *args, world)",
    "data_parallel": "(step, /, *, world, donate_state, check_vma, static_graph, "
    "compiler_options)",
    "describe": "(step, state, *batches)",
    "distributed_optimizer": "(tx, *, divide_by, axis_name, plan, packing, all_reduce)",
    "flatten_buckets": "(plan, tree)",
    "global_batch": "(world, local_batch)",
    "gradient_order": "(loss_fn, params, *args)",
    "init": "(*, coordinator_address, num_processes, process_id, local_device_ids, "
    "num_cpu_devices, axis_name, num_nodes, timeout_s)",
    "join_batches": "(batches, *, world, prefetch, like)",
    "local_gradients": "(loss_fn, *, has_aux, find_unused, axis_name)",
    "plan_buckets": "(tree, *, bucket_bytes, first_bucket_bytes, order)",
    "replicate": "(world, tree)",
    "skip_unused": "(tx)",
    "sync_gradients": "(grads, *, used, weight, divide_by, axis_name, plan, packing, "
    "all_reduce)",
    "sync_in_backward": "(params, *, weight, divide_by, axis_name, packing, "
    "all_reduce)",
    "unflatten_buckets": "(plan, buffers)",
    "used_parameters": "(loss_fn, params, *args)",
    "value_and_grad": "(loss_fn, *, has_aux, find_unused, weight, divide_by, "
    "axis_name, plan, packing, all_reduce)",
}
TYPES = {"AllReduce", "BucketPlan", "Join", "JoinHook", "Joinable", "World"}


def test_all_is_the_contract():
    assert set(jdp.__all__) == SIGNATURES.keys() | TYPES
    assert jdp.__all__ == sorted(jdp.__all__)
    public = {name for name, value in vars(jdp).items() if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(jdp, name))}
    assert public - modules == set(jdp.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay(name):
    parameters = inspect.signature(getattr(jdp, name)).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_docstrings_say_what_goes_in_and_what_comes_out(name):
    fn = getattr(jdp, name)
    doc = inspect.getdoc(fn)
    assert doc and doc.splitlines()[0].endswith(".")
    if inspect.signature(fn).parameters:
        assert "Args:" in doc
        for parameter in inspect.signature(fn).parameters:
            assert f"{parameter}:" in doc, parameter
    assert "Returns:" in doc or "Raises:" in doc


def test_axis_name_is_data_by_default():
    for name in ("sync_gradients", "value_and_grad", "distributed_optimizer", "init"):
        parameter = inspect.signature(getattr(jdp, name)).parameters["axis_name"]
        assert parameter.default == "data"


def test_a_world_says_who_is_who():
    for name in (
        "mesh",
        "axis_name",
        "num_replicas",
        "process_index",
        "process_count",
        "is_main_process",
    ):
        assert name in dir(jdp.World) or name in jdp.World.__dataclass_fields__


COLLECTIVES = {
    "AutoAllReduce": "(thresholds, explain)",
    "Limits": "(*, num_replicas, one_stage_below, multimem_from, max_bytes, "
    "max_blocks)",
    "PallasAllReduce": "(algorithm, thresholds)",
    "SharedMemoryAllReduce": "(buffer)",
    "Thresholds": "(*, limits, source)",
    "Topology": "(platform, num_hosts, compute_capability, is_fully_connected, "
    "has_multicast, unknown_because)",
    "adasum": "(tree, axis_name)",
    "auto_all_reduce": "(x, axis_name, *, op)",
    "butterfly_all_reduce": "(x, axis_name, *, op, num_chunks)",
    "choose": "(num_bytes, num_replicas, links)",
    "create_shared_buffer": "(world, num_bytes, *, axis_name)",
    "fit_links": "(world, all_reduces, *, sizes, rounds)",
    "halving_doubling_all_reduce": "(x, axis_name, *, op, num_chunks)",
    "hierarchical_all_reduce": "(x, axis_name, *, op, within, across)",
    "pallas_all_reduce": "(x, axis_name, *, op, scale)",
    "predict": "(algorithm, num_bytes, num_replicas, links, *, dtype, num_chunks, "
    "node)",
    "psum_all_reduce": "(x, axis_name, *, op)",
    "reduce_broadcast_all_reduce": "(x, axis_name, *, op, pattern, root, num_chunks)",
    "ring_all_reduce": "(x, axis_name, *, op, bidirectional, num_chunks)",
    "shared_memory_all_reduce": "(x, axis_name, *, op)",
    "should_use_custom": "(num_bytes, num_replicas, dtype, topology, *, thresholds, "
    "explain)",
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_signatures_of_collectives_stay(name):
    fn = getattr(jdp.collectives, name)
    parameters = inspect.signature(fn).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == COLLECTIVES[name]
    assert name in jdp.collectives.__all__


def test_collectives_are_listed():
    listed = jdp.collectives.__all__
    assert len(set(listed)) == len(listed)
    for name in listed:
        assert getattr(jdp.collectives, name) is not None
    by_name = {k: v for k, v in vars(jdp.collectives).items() if k in listed}
    for name, value in by_name.items():
        if inspect.isfunction(value):
            doc = inspect.getdoc(value)
            assert doc and "Args:" in doc and "Returns:" in doc, name
            for parameter in inspect.signature(value).parameters:
                assert f"{parameter}:" in doc, (name, parameter)
