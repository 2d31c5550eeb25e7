"""docs/faq.md: its answers hold."""

import hashlib
import importlib.metadata
import re

import jax
import numpy as np
import optax
import pytest

import jdp
from tests import commands, harness, page_blocks

PAGE = (harness.ROOT / "docs/faq.md").read_text()


def _answers():
    for part in re.split(r"(?m)^### ", PAGE)[1:]:
        question, _, answer = part.partition("\n")
        yield question, answer.split("\n## ")[0].strip()


def test_every_question_has_a_short_answer_and_most_have_a_link():
    answers = dict(_answers())
    assert len(answers) >= 20
    for question, answer in answers.items():
        assert question.endswith("?")
        assert 0 < len(answer.split()) < 100, question
    without = [question for question, answer in answers.items() if "](" not in answer]
    assert without == ["When should I not use it?"]


def test_the_versions_are_those_of_the_package():
    metadata = (harness.ROOT / "pyproject.toml").read_text()
    for pattern, name in [
        (r'requires-python = ">=([\d.]+)"', "Python"),
        (r'"jax>=([\d.]+)"', "JAX"),
        (r'"optax>=([\d.]+)"', "optax"),
    ]:
        assert f"{name} {re.search(pattern, metadata)[1]} or newer" in PAGE
    assert importlib.metadata.metadata("jdp")["License-Expression"] == "Apache-2.0"
    assert "Apache 2.0" in PAGE


def test_multi_steps_and_clipping_give_the_numbers_of_one_device():
    def loss_fn(params, batch):
        return ((batch["x"] @ params - batch["y"]) ** 2).mean()

    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    tx = optax.MultiSteps(clipped, 2)
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=8)} for _ in range(6)
    ]
    batches = jax.tree.map(np.float32, batches)
    start = np.ones(3, np.float32)

    def update(value_and_grad, params, opt_state, batch):
        _, grads = value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    world = harness.local_world(4)

    @jdp.data_parallel(world=world, num_states=2)
    def step(params, opt_state, batch):
        return *update(jdp.value_and_grad, params, opt_state, batch), {}

    alone = together = (start, tx.init(start))
    for batch in batches:
        alone = jax.jit(lambda *a: update(jax.value_and_grad, *a))(*alone, batch)
        together = step(*together, batch)[:2]
    assert not np.allclose(alone[0], start)
    np.testing.assert_allclose(together[0], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_runs_of_two_processes_give_equal_bits(tmp_path):
    (tmp_path / "train.py").write_text(
        f"{page_blocks.PRELUDE}\nimport hashlib\nworld = jdp.init()\n"
        "tx = optax.adam(1e-2)\n"
        "@jdp.data_parallel(num_states=2)\n"
        "def step(params, opt_state, batch):\n"
        "    loss, grads = jdp.value_and_grad(loss_fn)(params, batch)\n"
        "    updates, opt_state = tx.update(grads, opt_state, params)\n"
        "    return optax.apply_updates(params, updates), opt_state, loss\n"
        "rng = np.random.default_rng(world.process_index)\n"
        "opt_state = tx.init(params)\n"
        "for _ in range(20):\n"
        "    x = rng.normal(size=(8, 4)).astype(np.float32)\n"
        "    batch = {'x': x, 'y': np.sin(x.sum(axis=1))}\n"
        "    params, opt_state, _ = step(params, opt_state, batch)\n"
        "bits = np.asarray(params['w']).tobytes()\n"
        "print('bits', hashlib.sha256(bits).hexdigest())\n"
    )
    found = []
    for _ in range(2):
        code, out, err = commands.launch(2, "train.py", cwd=tmp_path)
        assert code == 0, err
        found += re.findall(r"bits (\w+)", out)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0] != hashlib.sha256(bytes(16)).hexdigest()  # It has learned.
