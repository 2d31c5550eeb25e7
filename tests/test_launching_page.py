"""docs/launching.md: what it gives to be copied is right, and its tables are whole."""

import ast
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from jdp.eager.options import PREFIX
from jdp.launch import launch
from jdp.runtime import job_key
from tests import commands, harness, page_blocks, test_pages

PAGE = "docs/launching.md"
TEXT = (harness.ROOT / PAGE).read_text()
_VARIABLE = re.compile(r"\b_?JDP_[A-Z_]*[A-Z]\b(?!_)")


def _section(title):
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def _block(language):
    (block,) = [b for b in page_blocks.find(language) if b.page == PAGE]
    return block.text


def _launch_options(words):
    """Returns the parameters that `jdp launch` reads from the words after it."""
    command, rest = test_pages._find_command(words)
    assert command.name == "launch"
    return command.make_context("launch", rest).params


def test_the_table_has_every_variable_of_jdp():
    used = set()
    for path in (harness.ROOT / "jdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _VARIABLE.fullmatch(node.value):
                    used.add(node.value)
    rows = re.findall(r"(?m)^\| (`_?JDP_.*?) \|", _section("Environment variables"))
    shown = {name for row in rows for name in _VARIABLE.findall(row)}
    assert len(used) > 20
    assert shown == used
    assert any(f"`{PREFIX}...`" in row for row in rows)


def test_the_manifest_of_kubernetes_fits_together():
    service, secret, job = yaml.safe_load_all(_block("yaml"))
    assert [each["kind"] for each in (service, secret, job)] == [
        *("Service", "Secret", "Job"),
    ]
    assert job["apiVersion"] == "batch/v1"
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    # A pod has the name of the Job with its index, in the domain of the Service.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    (container,) = pod["containers"]
    assert container["command"] == ["/bin/sh", "-c"]
    (script,) = container["args"]
    run = ["sh", "-c", script.replace("exec jdp", "printf '%s\\n' jdp")]
    words = subprocess.run(
        run, env={"JOB_COMPLETION_INDEX": "1"}, capture_output=True, text=True
    ).stdout.split()
    assert words[:2] == ["jdp", "launch"]
    options = _launch_options(words[1:])
    launch.LaunchOptions(
        num_processes=options["num_processes"],
        num_nodes=options["num_nodes"],
        node_rank=options["node_rank"],
        coordinator_address=options["coordinator"],
        grace_s=options["grace_s"],
    )
    assert options["coordinator"].split(":")[0] == f"{name}-0.{pod['subdomain']}"
    assert (options["num_nodes"], options["node_rank"]) == (spec["completions"], 1)
    limits = container["resources"]["limits"]
    assert options["num_processes"] == limits["nvidia.com/gpu"]
    assert options["grace_s"] < pod["terminationGracePeriodSeconds"]
    (source,) = container["envFrom"]
    assert source["secretRef"]["name"] == secret["metadata"]["name"]
    assert len(job_key.from_environ(secret["stringData"])) == job_key.KEY_BYTES
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = pod["volumes"]
    assert mounted == {volume["name"]: "/dev/shm"}
    assert volume["emptyDir"]["medium"] == "Memory"
    # The label by which the policy of the page on security finds the pods.
    policy = (harness.ROOT / "docs/security.md").read_text()
    (key, value), *_ = spec["template"]["metadata"]["labels"].items()
    assert f"{key}: {value}" in policy


def _instructions(text):
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest


def test_the_dockerfile_starts_a_job():
    found = dict(_instructions(_block("dockerfile")))
    assert set(found) <= {"FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"}
    assert next(_instructions(_block("dockerfile")))[0] == "FROM"
    version = re.fullmatch(r"python:3\.(\d+)-slim", found["FROM"])
    metadata = (harness.ROOT / "pyproject.toml").read_text()
    assert int(version[1]) >= int(re.search(r'python = ">=3\.(\d+)"', metadata)[1])
    copied = [rest.split() for name, rest in _instructions(_block("dockerfile"))
              if name == "COPY"]  # fmt: skip
    (folder,) = [target for source, target in copied if source == "jdp/"]
    assert found["RUN"].split()[:2] == ["pip", "install"]
    assert found["RUN"].split()[-1] == folder.rstrip("/")
    words = json.loads(found["ENTRYPOINT"]) + json.loads(found["CMD"])
    assert words[0] == "jdp"
    assert _launch_options(words[1:])["num_processes"] == 2
    assert ["train.py", "."] in copied


def test_containers_of_the_page_get_options_of_the_launcher():
    runs = [words for _, words in test_pages._lines() if words[:2] == ["docker", "run"]]
    assert len(runs) == 2
    for words in runs:
        image = words.index("train")
        options = _launch_options(["launch", *words[image + 1 :]])
        assert options["script"] == "train.py"


def test_the_script_of_slurm_asks_for_a_gpu_per_task():
    (script,) = [
        block.text for block in page_blocks.find("sh") if "#SBATCH" in block.text
    ]
    options = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=(\S+)$", script))
    assert len(options) == script.count("#SBATCH")
    assert options["gres"] == f"gpu:{options['ntasks-per-node']}"
    assert script.startswith("#!/bin/bash\n")
    key = re.search(rf"(?m)^export {job_key.VARIABLE}=(.*)$", script)[1]
    made = subprocess.run(
        ["bash", "-c", f"echo {key}"], capture_output=True, text=True, check=True
    ).stdout
    assert len(job_key.from_environ({job_key.VARIABLE: made.strip()})) == 32
    assert shlex.split(script.splitlines()[-1])[-2:] == ["python", "train.py"]


@pytest.mark.multiprocess
def test_the_cell_of_a_notebook_makes_eight_replicas():
    cell = page_blocks.python(PAGE, 0)
    result = subprocess.run(
        [sys.executable, "-c", f"{cell}\nprint(world.num_replicas)"],
        env=commands.environ() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "8\n", result.stderr


def test_links_of_all_pages_lead_somewhere():
    """Relative links of the pages: their files exist, and their headings."""
    for page in page_blocks.PAGES:
        path = harness.ROOT / page
        text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text())
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            there = path.parent / file if file else path
            assert there.exists(), (page, target)
            if anchor:
                assert anchor in _anchors(there.read_text()), (page, target)


def _anchors(text):
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}
