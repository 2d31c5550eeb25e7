"""The contract: `__all__`, signatures, docstrings."""

import dataclasses
import importlib
import inspect
import operator
import re
import tomllib
import typing

import pytest

import jdp
from jdp import eager, parameter_server
from jdp.collectives import pallas
from tests import harness

SIGNATURES = {
    "accumulate_gradients": "(loss_fn, num_micro_batches, *, argnums, has_aux, "
    "find_unused, allow_int, dtype, weight, divide_by, axis_name, plan, packing, "
    "all_reduce, hook, hook_state, find_norms)",
    "average": "(tree, *, weight, divide_by, axis_name)",
    "broadcast_from": "(tree, source, *, axis_name)",
    "check_replicas": "(tree, *, world)",
    "check_same_program": "(fn, *args, world)",
    "consolidate": "(state, *, like)",
    "copy_per_replica": "(tree, *, axis_name, world)",
    "data_parallel": "(step, /, *, world, static_argnames, replicated_argnames, "
    "donate_state, split_batches, num_states, check_vma, static_graph, "
    "check_every, record_fingerprints, compiler_options, num_shards)",
    "describe": "(step, state, /, *batches, **named)",
    "diloco": "(tx, *, period, outer, num_fragments, delay, mixing, axis_name, "
    "all_reduce, world)",
    "distributed_optimizer": "(tx, *, divide_by, axis_name, plan, packing, all_reduce, "
    "hook, world)",
    "dynamic_loss_scale": "(tx, *, init_scale, growth_interval, growth_factor, "
    "backoff_factor)",
    "fingerprint_state": "(tree, *, world)",
    "flatten_buckets": "(plan, tree)",
    "global_batch": "(world, local_batch)",
    "gradient_order": "(loss_fn, params, *args)",
    "init": "(*, coordinator_address, num_processes, process_id, local_device_ids, "
    "num_cpu_devices, axis_name, num_nodes, timeout_s, mesh, manual_axes, num_shards, "
    "stall_s, on_stall)",
    "join_batches": "(batches, *, world, prefetch, like)",
    "local_gradients": "(loss_fn, argnums, *, has_aux, find_unused, allow_int, "
    "axis_name)",
    "local_sgd": "(tx, *, period, warmup_steps, axis_name, all_reduce, world)",
    "loss_scale": "(opt_state)",
    "mean_loss": "(loss_fn, argnums, *, weight, divide_by, axis_name, plan, packing, "
    "all_reduce)",
    "merge_metrics": "(metrics, *, weight, axis_name)",
    "noise_scale": "(*, decay)",
    "plan_buckets": "(tree, *, bucket_bytes, first_bucket_bytes, order)",
    "replicate": "(world, tree, *, process, specs)",
    "replicated": "(fn, /, *, world, static_argnames, replicated_argnames, "
    "split_batches, compiler_options)",
    "reshard": "(saved, *, like)",
    "shard_key": "(key, *, axis_name)",
    "shutdown": "()",
    "checkpoint_template": "(state, *, num_replicas)",
    "skip_unused": "(tx)",
    "spread": "(whole, *, like)",
    "sum_over_replicas": "(tree, *, axis_name)",
    "sync_buffers": "(buffers, *, policy, source, axis_name)",
    "sync_gradients": "(grads, *, used, weight, divide_by, axis_name, plan, packing, "
    "all_reduce, hook, hook_state, find_norms)",
    "sync_in_backward": "(params, *, weight, divide_by, axis_name, packing, "
    "all_reduce)",
    "unflatten_buckets": "(plan, buffers)",
    "used_parameters": "(loss_fn, params, *args)",
    "value_and_grad": "(loss_fn, argnums, *, has_aux, find_unused, allow_int, weight, "
    "divide_by, "
    "axis_name, plan, packing, all_reduce, hook, hook_state, find_norms)",
    "zero1": "(tx, *, divide_by, axis_name, plan, halves, hook, world)",
}
TYPES = {
    "AllReduce",
    "BucketPlan",
    "FingerprintRecord",
    "GradientNorms",
    "Join",
    "JoinHook",
    "Joinable",
    "LocalTraining",
    "LossScaleState",
    "NoiseScaleState",
    "PerReplica",
    "Shard",
    "StateFingerprint",
    "StreamShard",
    "World",
    "ZeroState",
}


def test_all_is_the_contract():
    assert set(jdp.__all__) == SIGNATURES.keys() | TYPES
    assert jdp.__all__ == sorted(jdp.__all__)
    for name in jdp.__all__:  # A name is imported when it is first used.
        assert getattr(jdp, name) is vars(jdp)[name]
    public = {name for name, value in vars(jdp).items() if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(jdp, name))}
    assert public - modules == set(jdp.__all__) | {"Any", "TYPE_CHECKING"}


def test_the_version_is_a_constant_that_the_package_is_built_with():
    settings = tomllib.loads((harness.ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version", "readme"]
    assert settings["tool"]["hatch"]["version"]["path"] == "jdp/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", jdp.__version__)


def test_the_docstring_of_a_join_names_its_options():
    doc = inspect.getdoc(jdp.Join)
    assert doc and "Args:" in doc and "Raises:" in doc
    options = inspect.signature(jdp.Join).parameters.keys() - {"kwargs"}
    for name in options | {"last_joiner"}:
        assert f"{name}:" in doc, name
    assert all(f"`{name}`:" in doc for name in ("divide_by", "example"))


@pytest.mark.parametrize("shard", [jdp.Shard, jdp.StreamShard])
def test_shards_say_what_they_take(shard):
    names = {"data", "epoch", "position"}
    assert all(f"{name}:" in inspect.getdoc(shard) for name in names)
    assert [*inspect.signature(shard.set_epoch).parameters] == [
        "self",
        "epoch",
        "position",
    ]
    assert [*inspect.signature(shard.batches).parameters] == ["self", "batch_size"]
    parameters = inspect.signature(jdp.World.shard).parameters
    assert [*parameters] == ["world", "data", "shuffle", "seed", "drop_last"]
    assert all(f"{name}:" in inspect.getdoc(jdp.World.shard) for name in parameters)


def test_the_docstring_of_a_world_names_its_fields():
    doc = inspect.getdoc(jdp.World)
    assert doc and "Attributes:" in doc
    for field in dataclasses.fields(jdp.World):
        assert f"{field.name}:" in doc, field.name


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


def test_the_axis_is_data_by_default_and_other_functions_follow_it():
    assert inspect.signature(jdp.init).parameters["axis_name"].default == "data"
    others = [getattr(jdp, name) for name in SIGNATURES if name != "init"]
    others += [jdp.collectives.adasum, jdp.hooks.init_state]
    parameters = [inspect.signature(fn).parameters.get("axis_name") for fn in others]
    defaults = [p.default for p in parameters if p is not None]
    assert len(defaults) > 12 and set(defaults) == {None}


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
    "PallasAllReduce": "(algorithm, thresholds)",
    "SharedMemoryAllReduce": "(buffer)",
    "TcpAllReduce": "(links)",
    "adasum": "(tree, axis_name)",
    "auto_all_reduce": "(x, axis_name, *, op)",
    "butterfly_all_reduce": "(x, axis_name, *, op, num_chunks)",
    "choose": "(num_bytes, num_replicas, links)",
    "create_shared_buffer": "(world, num_bytes, *, axis_name)",
    "fit_links": "(world, all_reduces, *, sizes, rounds, budget_s)",
    "halving_doubling_all_reduce": "(x, axis_name, *, op, num_chunks)",
    "hierarchical_all_reduce": "(x, axis_name, *, op, within, across)",
    "open_tcp_links": "(world, *, axis_name)",
    "pallas_all_reduce": "(x, axis_name, *, op, scale)",
    "predict": "(algorithm, num_bytes, num_replicas, links, *, dtype, num_chunks, "
    "node)",
    "psum_all_reduce": "(x, axis_name, *, op)",
    "reduce_broadcast_all_reduce": "(x, axis_name, *, op, pattern, root, num_chunks)",
    "ring_all_reduce": "(x, axis_name, *, op, bidirectional, num_chunks)",
    "shared_memory_all_reduce": "(x, axis_name, *, op)",
    "tcp_all_reduce": "(x, axis_name, *, op)",
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
        if inspect.isfunction(value) or name == "pallas_all_reduce":
            doc = inspect.getdoc(value)
            assert doc and "Args:" in doc and "Returns:" in doc, name
            for parameter in inspect.signature(value).parameters:
                assert f"{parameter}:" in doc, (name, parameter)


PALLAS = {
    "Limits": "(*, num_replicas, one_stage_below, multimem_from, max_bytes, "
    "max_blocks)",
    "Thresholds": "(*, limits, source)",
    "Topology": "(platform, num_hosts, compute_capability, is_fully_connected, "
    "has_multicast, unknown_because)",
    "should_use_custom": "(num_bytes, num_replicas, dtype, topology, *, thresholds, "
    "explain)",
}


@pytest.mark.parametrize("name", PALLAS)
def test_signatures_of_the_custom_kernel_stay(name):
    parameters = inspect.signature(getattr(pallas, name)).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == PALLAS[name]
    assert pallas.__all__ == sorted(PALLAS)


HOOKS = {
    "cast": "(dtype)",
    "chain": "(*hooks)",
    "init_state": "(hook, grads, *, plan, axis_name, world)",
    "int8": "(*, chunk_size)",
    "none": "()",
    "power_sgd": "(rank, *, start_step, min_compression_rate, warm_start, "
    "error_feedback, orthogonalization_epsilon, seed)",
    "rows": "(max_rows)",
    "top_k": "(fraction)",
}
HOOK_TYPES = {
    "CommHook",
    "ErrorFeedbackState",
    "HookAllReduce",
    "PowerSGDState",
    "RowsState",
}


def test_all_of_hooks_is_the_contract():
    assert set(jdp.hooks.__all__) == HOOKS.keys() | HOOK_TYPES
    assert jdp.hooks.__all__ == sorted(jdp.hooks.__all__)


@pytest.mark.parametrize("name", HOOKS)
def test_signatures_and_docstrings_of_hooks_stay(name):
    fn = getattr(jdp.hooks, name)
    parameters = inspect.signature(fn).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == HOOKS[name]
    doc = inspect.getdoc(fn)
    assert doc and (name == "none" or "Returns:" in doc)
    for parameter in inspect.signature(fn).parameters:
        assert f"{parameter}:" in doc, parameter


_REDUCTION = "op, prescale, postscale, wire_dtype, process_set"
EAGER = {
    "add_process_set": "(process_set)",
    "all_gather": "(tree, *, name, process_set)",
    "all_gather_object": "(value, *, name, process_set)",
    "all_reduce": f"(tree, *, name, {_REDUCTION})",
    "all_to_all": "(x, splits, *, name, process_set)",
    "barrier": "(*, timeout_s, process_set)",
    "broadcast": "(tree, *, root, name, process_set)",
    "broadcast_object": "(value, *, root, name, process_set)",
    "broadcast_optimizer_state": "(state, *, root, name, process_set)",
    "broadcast_parameters": "(params, *, root, name, process_set)",
    "cross_rank": "()",
    "cross_size": "()",
    "grouped_all_gather": "(tree, *, name, process_set)",
    "grouped_all_reduce": f"(tree, *, name, {_REDUCTION})",
    "grouped_reduce_scatter": "(tree, *, name, op, prescale, postscale, process_set)",
    "init": "(world, options, *, process_sets)",
    "is_initialized": "()",
    "join": "()",
    "local_rank": "()",
    "local_size": "()",
    "poll": "(handle)",
    "rank": "()",
    "reduce_scatter": "(tree, *, name, op, prescale, postscale, process_set)",
    "remove_process_set": "(process_set)",
    "shutdown": "()",
    "size": "()",
    "start_timeline": "(path, *, mark_cycles)",
    "stop_timeline": "()",
    "submit": "(step, *args, name)",
    "synchronize": "(handle, *, timeout_s)",
}
# Those that also begin, and return a handle.
ASYNC = {
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "grouped_all_gather",
    "grouped_all_reduce",
    "grouped_reduce_scatter",
    "join",
    "reduce_scatter",
    "submit",
}
EAGER_VALUES = {"EagerOptions", "Handle", "ProcessSet", "global_process_set"}


def test_all_of_eager_is_the_contract():
    names = EAGER.keys() | {f"{name}_async" for name in ASYNC} | EAGER_VALUES
    assert set(eager.__all__) == names and len(eager.__all__) == len(names)
    public = {name for name, value in vars(eager).items() if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(eager, name))}
    assert public - modules == names


@pytest.mark.parametrize("name", EAGER)
def test_signatures_of_eager_stay(name):
    fn = getattr(eager, name)
    parameters = inspect.signature(fn).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == EAGER[name]
    assert all(p.annotation is not p.empty for p in parameters)
    doc = inspect.getdoc(fn)
    assert doc and doc.splitlines()[0].endswith(".")
    for parameter in parameters:
        assert f"{parameter.name}:" in doc, parameter
    if parameters:
        assert "Returns:" in doc or "Raises:" in doc


@pytest.mark.parametrize("name", sorted(ASYNC))
def test_what_begins_takes_what_the_one_that_waits_takes(name):
    begin, fn = getattr(eager, f"{name}_async"), getattr(eager, name)
    waits, begins = inspect.signature(fn), inspect.signature(begin)
    assert begins.parameters == waits.parameters
    assert typing.get_origin(begins.return_annotation) is eager.Handle
    assert (inspect.getdoc(begin) or "").startswith(f"Begins `{name}`")


def test_options_and_sets_have_what_code_relies_on():
    for name in ("is_done", "result"):
        assert callable(getattr(eager.Handle, name))
    process_set = eager.ProcessSet([2, 0, 2])
    assert process_set.ranks == (0, 2) and process_set.process_set_id is None
    assert process_set.size() is process_set.rank() is process_set.included() is None
    assert eager.global_process_set.process_set_id == 0
    assert eager.EagerOptions() == eager.EagerOptions.from_environ({})


def test_every_option_is_in_the_docs_with_its_variable():
    page = (harness.ROOT / "docs/eager.md").read_text()
    for field in dataclasses.fields(eager.EagerOptions):
        variable = f"JDP_EAGER_{field.name.upper()}"
        assert f"| `{field.name}` | `{variable}` |" in page, field.name


def test_every_public_name_of_eager_is_in_the_docs():
    page = (harness.ROOT / "docs/eager.md").read_text()
    for name in eager.__all__:
        assert name.removesuffix("_async") in page, name


PARAMETER_SERVER = {
    "Place": "(*, role, index, addresses, num_workers, key_file)",
    "Place.from_environ": "(environ)",
    "Server": "(params, tx, *, mode, place, options)",
    "Server.serve": "(self)",
    "Server.stop": "(self)",
    "ServerOptions": "(*, lease_s, start_timeout_s, checkpoint_dir, checkpoint_every, "
    "nonfinite, hook, report, device)",
    "Worker": "(params, *, place, options)",
    "Worker.close": "(self)",
    "Worker.flush": "(self)",
    "Worker.prefetch": "(self)",
    "Worker.pull": "(self)",
    "Worker.push": "(self, grads, *, num_samples)",
    "Worker.steps": "(self, grad_fn, batches)",
    "WorkerOptions": "(*, hook, timeout_s, wait_timeout_s, shared_memory, device)",
    "asynchronous": "()",
    "bounded": "(*, staleness)",
    "make_keys": "(path)",
    "scale_by_staleness": "(tx, *, power)",
    "sync": "(*, backup)",
}


@pytest.mark.parametrize("name", PARAMETER_SERVER)
def test_signatures_of_parameter_servers_stay(name):
    fn = operator.attrgetter(name)(parameter_server)
    parameters = inspect.signature(fn).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == PARAMETER_SERVER[name]
    assert (inspect.getdoc(fn) or "").splitlines()[0].endswith(".")
    page = (harness.ROOT / "docs/parameter_server.md").read_text()
    assert name.split(".")[-1] in page
    if name.endswith("Options"):
        assert all(f"| `{p.name}` |" in page for p in parameters)


def test_all_of_parameter_server_is_the_contract():
    names = {name for name in PARAMETER_SERVER if "." not in name}
    assert set(parameter_server.__all__) == names
    public = {n for n in vars(parameter_server) if not n.startswith("_")}
    modules = {n for n in public if inspect.ismodule(getattr(parameter_server, n))}
    assert public - modules == names


_OF_LAYERS = "x, use_running_average, *, mask, weight"
LAYERS = {
    "batch_norm": {"sample_weights": "(weight)"},
    "flax_linen": {
        "DynamicScale.value_and_grad": "(self, fun, argnums, has_aux, axis_name, *, "
        "weight, divide_by)",
        "SyncBatchNorm.__call__": f"(self, {_OF_LAYERS})",
        "TrainState.apply_gradients": "(self, *, grads, is_finite, update_args, "
        "**kwargs)",
        "TrainState.create": "(*, apply_fn, params, tx, sync_batch_norm, **kwargs)",
        "TrainState.rngs": "(self, *names)",
        "TrainState.variables": "(self, params)",
        "convert_batch_norm": "(model, *, axis_name)",
        "sync_batch_norms": "(*, axis_name)",
    },
    "flax_nnx": {
        "SyncBatchNorm.__call__": f"(self, {_OF_LAYERS})",
        "convert_batch_norm": "(model, *, axis_name)",
        "data_parallel": "(step, /, *, world, static_argnames, replicated_argnames, "
        "donate_state, split_batches, check_vma, static_graph, check_every, "
        "record_fingerprints, compiler_options, num_shards)",
        "value_and_grad": "(loss_fn, *, argnums, has_aux, find_unused, allow_int, "
        "weight, divide_by, axis_name, plan, packing, all_reduce, hook, hook_state, "
        "find_norms)",
    },
}


@pytest.mark.parametrize("module", LAYERS)
def test_all_of_layers_is_the_contract(module):
    listed = importlib.import_module(f"jdp.{module}").__all__
    assert listed == sorted({name.split(".")[0] for name in LAYERS[module]})


@pytest.mark.parametrize(
    "module, name", [(m, name) for m, names in LAYERS.items() for name in names]
)
def test_signatures_of_layers_stay(module, name):
    fn = operator.attrgetter(name)(importlib.import_module(f"jdp.{module}"))
    parameters = inspect.signature(fn).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == LAYERS[module][name]
    doc = inspect.getdoc(fn)
    assert doc and ("Args:" in doc or name == "TrainState.rngs")
    named = [p.name for p in parameters if p.name not in ("self", "names")]
    assert all(f"{parameter}:" in doc for parameter in named)
    pages = ("docs/batch_norm.md", "docs/flax.md")
    text = "".join((harness.ROOT / page).read_text() for page in pages)
    assert all(part.strip("_") in text for part in name.split("."))
