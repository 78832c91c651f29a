"""The manifests render, and every object obeys the schema of the API that it is for."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from orcaserve.cluster.config import ServeConfig
from orcaserve.cluster.scheduler_actor import NODE_RESOURCE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CRDS = ROOT.parent / "shared" / "kuberay-crds"
OVERLAYS = ["cpu", "h100x4"]


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[dict]:
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    folder = DEPLOY / "kubernetes" / "overlays" / request.param
    run = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def ray_service(objects: list[dict]) -> dict:
    return next(o for o in objects if o["kind"] == "RayService")


def pods(objects: list[dict]) -> dict[str, dict]:
    """Pod templates of the Ray cluster by group name."""
    cluster = ray_service(objects)["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **workers}


def closed(schema: dict) -> dict:
    """The schema with unknown fields forbidden: the API server would drop them in silence."""
    if not isinstance(schema, dict):
        return schema
    result = {k: closed(v) if isinstance(v, dict) and k != "properties" else v for k, v in schema.items()}
    if "properties" in schema:
        result["properties"] = {k: closed(v) for k, v in schema["properties"].items()}
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if not open_ended:
            result["additionalProperties"] = False
    return result


def test_core_objects_obey_kubernetes(objects: list[dict]) -> None:
    core = [o for o in objects if not o["apiVersion"].startswith(("ray.io", "monitoring.coreos.com"))]
    assert {"CronJob", "NetworkPolicy", "PodDisruptionBudget"} <= {o["kind"] for o in core}
    for o in core:
        kubernetes_validate.validate(o, "1.32", strict=True)
    for template in pods(objects).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.32", strict=True)


def test_ray_service_obeys_kuberay(objects: list[dict]) -> None:
    if not CRDS.exists():
        pytest.skip("the KubeRay schemas are not beside this checkout")
    schema = json.loads((CRDS / "rayservices.json").read_text())["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object", "additionalProperties": True}
    errors = [
        f"{list(e.absolute_path)}: {e.message[:200]}"
        for e in jsonschema.Draft7Validator(closed(schema)).iter_errors(ray_service(objects))
    ]
    assert errors == []


def test_serve_config_obeys_ray_and_ours(objects: list[dict]) -> None:
    config = yaml.safe_load(ray_service(objects)["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "orcaserve.cluster.app:build"
    ServeConfig.model_validate(application.args)


def test_the_scheduler_sits_with_the_routers(objects: list[dict]) -> None:
    """Not on the head, which may restart under running groups, nor on a node that comes and goes with a group."""
    cluster = ray_service(objects)["spec"]["rayClusterConfig"]
    of_groups = {group["groupName"]: group["rayStartParams"] for group in cluster["workerGroupSpecs"]}
    declared = {name: json.loads(json.loads(params.get("resources", '"{}"'))) for name, params in of_groups.items()}
    assert [name for name, resources in declared.items() if NODE_RESOURCE in resources] == ["routers"]
    assert "resources" not in cluster["headGroupSpec"]["rayStartParams"]


def test_case_27_traffic_waits_for_a_generated_token(objects: list[dict]) -> None:
    (container,) = pods(objects)["routers"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8000}


def test_case_26_pods_outlive_their_drain(objects: list[dict]) -> None:
    for name, template in pods(objects).items():
        (container,) = template["spec"]["containers"]
        if name == "head":
            continue
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:2] == ["orcaserve", "drain"]
        assert template["spec"]["terminationGracePeriodSeconds"] > int(command[command.index("--timeout") + 1])


def test_no_pod_runs_as_root(objects: list[dict]) -> None:
    for template in pods(objects).values():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_only_the_api_port_is_open_to_all(objects: list[dict]) -> None:
    policy = next(o for o in objects if o["kind"] == "NetworkPolicy" and o["metadata"]["name"] == "orcaserve")
    open_to_all = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert open_to_all == [[{"protocol": "TCP", "port": 8000}]]


def test_images_are_pinned(objects: list[dict]) -> None:
    text = yaml.safe_dump_all(objects)
    images = [line.split("image:")[1].strip() for line in text.splitlines() if "image: " in line]
    assert images
    assert all(":" in image and not image.endswith(":latest") for image in images)


def test_alerts_obey_prometheus() -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed")
    command = ["promtool", "check", "rules", str(DEPLOY / "prometheus" / "alerts.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_alerts_point_into_the_runbook_and_it_names_alerts_that_exist() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    named = set(re.findall(r"Orcaserve[A-Z]\w+", (DEPLOY / "RUNBOOK.md").read_text()))
    assert named <= {rule["alert"] for rule in rules}
    headings = [
        line.lstrip("# ").strip().lower().replace(" ", "-")
        for line in (DEPLOY / "RUNBOOK.md").read_text().splitlines()
        if line.startswith("#")
    ]
    for rule in rules:
        file, anchor = rule["annotations"]["runbook"].split("#")
        assert file == "deploy/RUNBOOK.md"
        assert anchor in headings, rule["alert"]
