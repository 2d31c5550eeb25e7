"""docs/security.md: what it gives to be copied is right."""

import re

import yaml

from jdp.runtime import job_key
from tests import harness

PAGE = (harness.ROOT / "docs/security.md").read_text()


def test_the_network_policy_lets_pods_of_the_job_reach_each_other_and_none_else_in():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    policy, secret = yaml.safe_load_all(block)
    assert (policy["apiVersion"], policy["kind"]) == (
        "networking.k8s.io/v1",
        "NetworkPolicy",
    )
    spec = policy["spec"]
    own = {"podSelector": spec["podSelector"]}
    assert spec["podSelector"]["matchLabels"]  # An empty one would be every pod.
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"from": [own]}]  # All ports: gloo's are any.
    assert spec["egress"][0] == {"to": [own]}
    assert {p["port"] for p in spec["egress"][1]["ports"]} == {53}
    assert secret["kind"] == "Secret"
    assert len(job_key.from_environ(secret["stringData"])) == job_key.KEY_BYTES


def test_the_page_is_linked_and_names_the_variable():
    start = (harness.ROOT / "docs/getting_started.md").read_text()
    assert "(security.md)" in start
    assert f"`{job_key.VARIABLE}`" in PAGE and "--key-file" in PAGE
