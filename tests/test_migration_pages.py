"""The pages for those that come from torch DDP, Horovod and pmap.

Their tables are complete and name what exists. Their diffs turn scripts of the others,
in tests/originals, into scripts of jdp that train to the recorded numbers.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jdp
from jdp.eager import EagerOptions
from tests import commands, diffs, harness, rarely
from tests.originals import record

PAGES = {
    "torch_ddp": "docs/from_torch_ddp.md",
    "horovod": "docs/from_horovod.md",
    "flax_pmap": "docs/from_pmap.md",
}
# Options with which one process does what two do.
ALONE = {"horovod": ("--batch-size", "64", "--base-lr", "0.05")}

# Each step rounds numbers of about 1 to float32; there are 23 in each of 10 epochs.
PARAM_ATOL = 230 * 2.0**-24
LOSS_ATOL = PARAM_ATOL + 0.5e-6  # What is printed has 6 decimals.
ONE_SAMPLE = 1 / 297 + 1e-4  # of the test set may be near the border of two classes.

# What a reader looks for, by page.
VOCABULARY = {
    "torch_ddp": """
        torchrun init_process_group destroy_process_group get_rank get_world_size
        DistributedDataParallel bucket_cap_mb find_unused_parameters
        gradient_as_bucket_view static_graph broadcast_buffers no_sync
        register_comm_hook allreduce_hook fp16_compress_hook bf16_compress_hook
        fp16_compress_wrapper bf16_compress_wrapper powerSGD_hook PowerSGDState
        batched_powerSGD_hook quantization_pertensor_hook quantization_perchannel_hook
        post_localSGD_hook PostLocalSGDState PostLocalSGDOptimizer
        PeriodicModelAverager HierarchicalModelAverager noop_hook hook_with_zero_step
        hook_with_zero_step_interleaved ZeroRedundancyOptimizer Join Joinable JoinHook
        DistributedSampler set_epoch DataLoader SyncBatchNorm.convert_sync_batchnorm
        all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all
        all_to_all_single broadcast broadcast_object_list gather gather_object scatter
        scatter_object_list reduce reduce_scatter reduce_scatter_tensor send recv isend
        irecv batch_isend_irecv all_reduce_coalesced async_op barrier
        monitored_barrier GradScaler autocast torch.save torch.load local_rank
        LOCAL_RANK MASTER_ADDR WORLD_SIZE NCCL_DEBUG NCCL_SOCKET_IFNAME
        TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_FR_BUFFER_SIZE
        TORCH_NCCL_TRACE_BUFFER_SIZE OMP_NUM_THREADS timeout new_group
        FullyShardedDataParallel fully_shard FSDP parallelize_module DTensor DeviceMesh
        clip_grad_norm_ torch.compile model.module
        """,
    "horovod": """
        horovodrun -np -H --hostfile --network-interfaces --start-timeout hvd.init
        hvd.shutdown hvd.is_initialized hvd.rank hvd.size hvd.local_rank hvd.local_size
        hvd.cross_rank hvd.cross_size hvd.allreduce op= compression= prescale_factor=
        postscale_factor= hvd.allreduce_async hvd.poll hvd.synchronize
        hvd.grouped_allreduce hvd.grouped_allgather hvd.grouped_reducescatter
        hvd.allgather hvd.broadcast hvd.alltoall hvd.reducescatter hvd.barrier hvd.join
        hvd.DistributedOptimizer named_parameters= backward_passes_per_step=
        gradient_predivide_factor= num_groups= groups= sparse_as_dense= process_set=
        hvd.broadcast_parameters hvd.broadcast_optimizer_state hvd.broadcast_object
        hvd.allgather_object hvd.ProcessSet hvd.add_process_set hvd.remove_process_set
        hvd.Compression.fp16 hvd.Compression.none hvd.Adasum hvd.Average hvd.Sum
        hvd.SyncBatchNorm hvd.start_timeline hvd.stop_timeline --autotune
        --timeline-filename hvd.elastic.run LearningRateWarmupCallback
        HOROVOD_FUSION_THRESHOLD HOROVOD_CYCLE_TIME HOROVOD_CACHE_CAPACITY
        HOROVOD_HIERARCHICAL_ALLREDUCE HOROVOD_HIERARCHICAL_ALLGATHER HOROVOD_TIMELINE
        HOROVOD_TIMELINE_MARK_CYCLES HOROVOD_AUTOTUNE HOROVOD_AUTOTUNE_LOG
        HOROVOD_AUTOTUNE_WARMUP_SAMPLES HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
        HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE
        HOROVOD_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_TIME_SECONDS
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_LOG_LEVEL HOROVOD_GLOO_IFACE
        HOROVOD_GLOO_TIMEOUT_SECONDS HOROVOD_THREAD_AFFINITY HOROVOD_NUM_NCCL_STREAMS
        HOROVOD_DISABLE_GROUP_FUSION HOROVOD_DYNAMIC_PROCESS_SETS
        HOROVOD_TORUS_ALLREDUCE HOROVOD_CPU_OPERATIONS HOROVOD_CONTROLLER
        """,
    "flax_pmap": """
        jax.pmap lax.pmean lax.psum axis_name= in_axes= out_axes=
        static_broadcasted_argnums= donate_argnums= devices= axis_size=
        jax_utils.replicate jax_utils.unreplicate shard_batch common_utils.shard
        common_utils.shard_prng_key jax_utils.prefetch_to_device jax.random.split
        sync_batch_stats cross_replica_mean jax.shard_map NamedSharding jax.jit
        in_shardings= checkpoints.save_checkpoint checkpoints.restore_checkpoint
        jax.distributed.initialize jax.local_device_count jax.process_index
        with_sharding_constraint make_array_from_process_local_data
        multihost_utils.process_allgather nn.BatchNorm(axis_name="batch")
        dynamic_scale.DynamicScale axis_index_groups=
        """,
}


def _rows(name):
    """The rows of the tables of words, as (there, here)."""
    text = (harness.ROOT / PAGES[name]).read_text()
    text = text.split("\n## Words\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [line[2:-2].split(" | ") for line in lines if not line.startswith("|---")]
    assert all(len(row) == 2 and all(row) for row in rows), rows
    return rows


def _has_word(word, text):
    end = r"(?![\w-])" if word[-1] != "=" else ""
    return re.search(rf"(?<![\w-]){re.escape(word)}{end}", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_reader_finds_every_word(name):
    there = " ".join(row[0] for row in _rows(name))
    words = VOCABULARY[name].split()
    assert len(words) == len({*words}) > 30
    assert [w for w in words if not _has_word(w, there)] == []


def _codes(name):
    """The texts in backticks of the right-hand columns."""
    return [code for _, here in _rows(name) for code in re.findall(r"`([^`]+)`", here)]


ROOTS = {"jdp": jdp, "jax": jax, "optax": optax, "np": np, "world": jdp.World}


def _resolve(dotted):
    """The object of a dotted name; raises if there is none."""
    root, *rest = dotted.split(".")
    value = importlib.import_module("jdp.eager") if root == "eager" else ROOTS[root]
    fields = getattr(value, "__dataclass_fields__", {})
    if root == "world" and rest[0] in fields:
        return fields[rest[0]]
    for i, part in enumerate(rest):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join([root, *rest[: i + 1]]))
    return value


def _calls(code):
    """The calls in a text such as `f(x, option=)`, as (name, options)."""
    code = re.sub(r"=(?=[,)])", "=...", code).removeprefix("@")
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        yield ast.unparse(call.func), [k.arg for k in call.keywords if k.arg]


def _parameters(fn):
    parameters = {*inspect.signature(fn).parameters}
    if "kwargs" in parameters:  # `jdp.Join`, whose joinables take options.
        parameters |= {*re.findall(r"`(\w+)`:", inspect.getdoc(fn) or "")}
    return parameters


NAME = re.compile(r"(?<![\w./\"])(?:jdp|jax|optax|np|eager|world)(?:\.[A-Za-z_]\w*)+")


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_exists(name):
    names = {n for code in _codes(name) for n in NAME.findall(code)}
    assert len({n for n in names if n.startswith(("jdp.", "eager."))}) > 20
    for dotted in sorted(names):
        assert _resolve(dotted) is not None, dotted


@pytest.mark.parametrize("name", PAGES)
def test_options_that_a_page_names_exist(name):
    num_options = 0
    for code in _codes(name):
        for fn, options in _calls(code):
            if options and fn.split(".")[0] in {"jdp", "eager", "world"}:
                assert {*options} <= _parameters(_resolve(fn)), code
                num_options += len(options)
        for variable in re.findall(r"JDP_EAGER_(\w+)", code):
            assert variable.lower() in EagerOptions.__dataclass_fields__, variable
    assert num_options > 10


@pytest.mark.parametrize("name", PAGES)
def test_options_that_stand_alone_are_options_of_jdp(name):
    """Options such as `packing="tuple"`, beside the function that takes them."""
    eager = importlib.import_module("jdp.eager")
    owners = (
        *(jdp.value_and_grad, jdp.data_parallel, jdp.init, jdp.Join),
        *(jdp.hooks.power_sgd, jdp.World.shard, eager.all_reduce),
    )
    known = {*itertools.chain(*map(_parameters, owners))}
    others = {"dtype"}  # of Flax's layers.
    alone = [m[1] for c in _codes(name) if (m := re.match(r"([a-z]\w*)=(?!=)", c))]
    assert len(alone) > 3
    assert [option for option in alone if option not in known | others] == []


def _diff(name):
    (diff,) = diffs.of_page(PAGES[name])
    return diff


@pytest.mark.parametrize("name", PAGES)
def test_an_original_does_not_know_jdp(name):
    assert "jdp" not in record.script(name).read_text()
    assert "import jdp" in diffs.apply(_diff(name), record.script(name).read_text())


def _changed(name, folder):
    path = folder / f"{name}_digits.py"
    path.write_text(diffs.apply(_diff(name), record.script(name).read_text()))
    return path


@functools.cache
def _expected(name):
    return record.load(name)


def _assert_equal(found, expected):
    np.testing.assert_allclose(
        found.history[:, 0], expected.history[:, 0], rtol=0, atol=LOSS_ATOL
    )
    np.testing.assert_allclose(
        found.history[:, 1], expected.history[:, 1], rtol=0, atol=ONE_SAMPLE
    )
    assert found.params.keys() == expected.params.keys() and len(found.params) > 5
    for path, param in expected.params.items():
        np.testing.assert_allclose(
            found.params[path], param, rtol=0, atol=PARAM_ATOL, err_msg=path
        )


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", rarely.cases(PAGES, often=["torch_ddp"]))
def test_a_changed_script_trains_as_the_original_in_two_processes(name, tmp_path):
    original = record.ORIGINALS[name]
    path = tmp_path / original.file
    options = original.saving_to(path)
    code, out, err = commands.launch(2, _changed(name, tmp_path), *options)
    assert code == 0, err
    _assert_equal(record.read(out, path), _expected(name))


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_changed_script_trains_as_the_original_in_one_process(name, tmp_path):
    original = record.ORIGINALS[name]
    path = tmp_path / original.file
    options = (*original.saving_to(path), *ALONE.get(name, ()))
    environ = commands.environ()
    flags = (environ["XLA_FLAGS"], original.environ.get("XLA_FLAGS", ""))
    done = subprocess.run(
        [sys.executable, _changed(name, tmp_path), *options],
        env={**environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    _assert_equal(record.read(done.stdout, path), _expected(name))


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_an_original_trains_to_its_recorded_numbers(name):
    needed = record.ORIGINALS[name].packages[0]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    _assert_equal(record.run(name, environ), _expected(name))


@pytest.mark.parametrize("name", PAGES)
def test_the_numbers_of_a_page_are_the_recorded_ones(name):
    text = (harness.ROOT / PAGES[name]).read_text()
    rows = re.findall(r"\| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|", text)
    assert [row[0] for row in rows] == ["0", "4", "9"]
    for epoch, loss, of_jdp, accuracy in rows:
        expected = _expected(name).history[int(epoch)]
        assert [float(loss), float(accuracy)] == pytest.approx(expected * [1, 100])
        assert abs(float(of_jdp) - expected[0]) <= LOSS_ATOL
