"""deploy/: the container's definition and the manifests are sound, and say what the code says."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from omniserve.server import http_process, service
from omniserve.server.access.keys import read_key_file
from omniserve.server.access.limits import Limits
from omniserve.server.cli import build_parser
from omniserve.server.engines import local
from omniserve.server.options import ServerOptions

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KINDS_OF_OTHERS = ("Kustomization", "ServiceMonitor", "ScaledObject")
"""Kinds whose schemas do not come with Kubernetes."""


def tool(name: str) -> str:
    """Return the path of a linter, beside this Python or on PATH; skip without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install 'omniserve[dev]')")
    return found


def lint(name: str, *arguments: str | Path) -> None:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def manifest(file: str) -> Any:
    return yaml.safe_load((DEPLOY / "kubernetes" / file).read_text())


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, each on one line, and their names."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def environment() -> dict[str, str]:
    """Return the variables of the image."""
    return dict(re.findall(r"(\w+)=\"?([^\"\s]+)", of("ENV")[-1]))


@pytest.fixture(scope="module")
def container() -> Any:
    (container,) = manifest("deployment.yaml")["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture(scope="module")
def settings(container: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what the container's command line and its settings say, as the server reads them."""
    assert container["args"][:2] == ["serve", "--config"]
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(manifest("config.yaml")["data"]["config.yaml"])
    return build_parser().parse_args(["--config", str(file)])


def test_the_containers_definition_is_clean() -> None:
    lint("hadolint", DEPLOY / "Dockerfile")


def test_the_manifests_are_clean() -> None:
    lint("yamllint", "--strict", "-c", DEPLOY / ".yamllint.yaml", DEPLOY / "kubernetes")


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_kubernetes_takes_a_manifest(file: Path) -> None:
    if manifest(file.name)["kind"] in KINDS_OF_OTHERS:
        return
    lint("kubernetes-validate", "--strict", file)


def test_what_is_copied_into_the_image_is_there_and_not_left_out() -> None:
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = {path for rest in of("COPY") if "--from" not in rest for path in rest.split()[:-1]}
    assert copied == kept and all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= copied, "the build reads them"
    extras = next(rest for rest in of("ARG") if rest.startswith("EXTRAS=")).removeprefix("EXTRAS=").split(",")
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
    assert "omniserve" in project["project"]["scripts"] and of("ENTRYPOINT") == ['["omniserve"]']


def test_the_image_is_built_as_the_makefile_builds() -> None:
    built = " ".join(of("RUN"))
    for step in (
        "-c constraints.txt 'setuptools>=77' wheel ninja",
        "--no-build-isolation",
        "'^torch==' constraints.txt",
    ):
        assert step in built
    assert "g++" in of("RUN")[-1], "torch.compile compiles when a model is served"
    assert environment()["GOMP_SPINCOUNT"] == "10000" and "GOMP_SPINCOUNT ?= 10000" in (ROOT / "Makefile").read_text()


def test_the_image_runs_without_root_and_keeps_data_where_volumes_are() -> None:
    (user,) = of("USER")
    assert user == "10001" and f"--uid {user}" in of("RUN")[-1]
    volumes = yaml.safe_load(of("VOLUME")[0])
    assert {environment()["XDG_DATA_HOME"], environment()["XDG_CACHE_HOME"]} == set(volumes)
    assert environment()["HF_HOME"].startswith(environment()["XDG_CACHE_HOME"])
    assert all(f"{volume}" in of("RUN")[-1] for volume in volumes), "they are made, and belong to the user"


def test_the_image_listens_where_it_is_asked_for_its_health(routes: set[str]) -> None:
    (port,) = (field.default for field in dataclasses.fields(ServerOptions) if field.name == "port")
    assert of("EXPOSE") == [str(port)]
    assert environment()["OMNISERVE_HOST"] == "0.0.0.0" and "--host" in build_parser().format_help()
    path = re.search(r"http://127\.0\.0\.1:8000(/[\w/]+)", of("HEALTHCHECK")[0])
    assert path is not None and path[1] in routes


@pytest.fixture(scope="module")
def routes() -> set[str]:
    """Return the paths of the server, as its code has them."""
    text = (ROOT / "omniserve" / "server" / "api.py").read_text()
    return set(re.findall(r'@routes\.get\("([\w/]+)"', text))


def test_settings_are_flags_with_values_that_they_take(settings: Any) -> None:
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert settings.served_model_name == ["chat"] and settings.log_format == "json"
    assert dict(settings.limit) == {"shutdown_timeout_s": "30"}


def test_files_are_where_settings_look_for_them(container: Any, settings: Any) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (keys,) = settings.api_key_file
    assert mounts[str(keys.parent)] == "keys" and keys.name in manifest("keys.yaml")["stringData"]
    config = Path(container["args"][2])
    assert mounts[str(config.parent)] == "config" and config.name in manifest("config.yaml")["data"]
    assert {environment()["XDG_DATA_HOME"], environment()["XDG_CACHE_HOME"], "/tmp"} <= mounts.keys()
    volumes = {each["name"]: each for each in manifest("deployment.yaml")["spec"]["template"]["spec"]["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    assert volumes["config"]["configMap"]["name"] == manifest("config.yaml")["metadata"]["name"]
    assert volumes["keys"]["secret"]["secretName"] == manifest("keys.yaml")["metadata"]["name"]
    assert volumes["storage"]["persistentVolumeClaim"]["claimName"] == manifest("storage.yaml")["metadata"]["name"]
    assert not any(str(other).startswith(f"{path}/") for path in mounts for other in mounts), "none is in another one"


def test_keys_are_such_as_the_server_reads(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(manifest("keys.yaml")["stringData"]["keys.yaml"])
    keys = read_key_file(file)
    assert [(key.name, key.admin) for key in keys] == [("operator", True), ("evaluations", False)]


def test_probes_and_scrapes_are_of_paths_and_ports_that_there_are(container: Any, routes: set[str]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[name]["httpGet"]
        assert get["path"] in routes and get["port"] in ports
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live", "an engine that starts again is no reason"
    (port,) = manifest("service.yaml")["spec"]["ports"]
    assert port["targetPort"] in ports
    (endpoint,) = manifest("prometheus.yaml")["spec"]["endpoints"]
    assert endpoint["path"] in routes and endpoint["port"] == port["name"]


def test_a_pod_has_as_long_to_end_as_the_server_takes(container: Any, settings: Any) -> None:
    pod = manifest("deployment.yaml")["spec"]["template"]["spec"]
    drain_s = float(dict(settings.limit).get("shutdown_timeout_s", Limits.shutdown_timeout_s))
    takes_s = drain_s + service._GOODBYE_S + http_process._CLOSE_CONNECTIONS_S + local._CLOSE_S
    takes_s += float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert takes_s < pod["terminationGracePeriodSeconds"] < 2 * takes_s


def test_the_pod_has_few_rights_and_whole_cores(container: Any) -> None:
    pod = manifest("deployment.yaml")["spec"]["template"]["spec"]
    assert str(pod["securityContext"]["runAsUser"]) == of("USER")[0] and pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["enableServiceLinks"] is False
    resources = container["resources"]
    assert resources["requests"] == resources["limits"] and resources["limits"]["cpu"].isdecimal()


def test_selectors_find_the_pod_and_the_kustomization_has_every_file() -> None:
    labels = manifest("deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    assert manifest("service.yaml")["spec"]["selector"].items() <= labels.items()
    assert manifest("disruption.yaml")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    service_labels = manifest("service.yaml")["metadata"]["labels"]
    assert manifest("prometheus.yaml")["spec"]["selector"]["matchLabels"].items() <= service_labels.items()
    listed = manifest("kustomization.yaml")["resources"]
    others = {file.name for file in MANIFESTS} - {*listed, "kustomization.yaml"}
    assert others == {"prometheus.yaml", "keda.yaml"}, "they need what not every cluster has"


def test_it_scales_by_a_metric_that_there_is() -> None:
    (trigger,) = manifest("keda.yaml")["spec"]["triggers"]
    name, label, values = re.findall(r"(\w+)\{(\w+)=~\"([^\"]+)\"", trigger["metadata"]["query"])[0]
    source = (ROOT / "omniserve" / "server" / "telemetry" / "scaling.py").read_text()
    assert all(f'"{word}"' in source for word in (name, label, *values.split("|")))


def test_the_rays_autoscaler_is_asked_for_what_the_server_wants() -> None:
    pytest.importorskip("ray")
    asks = runpy.run_path(str(DEPLOY / "ray" / "autoscale.py"))["wanted"]
    assert asks('omniserve_replicas_needed{work="batches"} 7.0\nomniserve_replicas_wanted 3.0\n') == 3
    assert asks("omniserve_engine_up 1.0\n") is None
    source = (ROOT / "omniserve" / "server" / "telemetry" / "scaling.py").read_text()
    assert '"omniserve_replicas_wanted"' in source
