"""The manifests of docker/kubernetes: Kubernetes' schemas, our own flags, and each other."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from envserver.cli import COMMANDS
from envserver.settings.server import ServerConfig

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
README = (FOLDER / "README.md").read_text()
KUSTOMIZATION = "kustomization.yaml"
Tree = dict[str, Any]
WAYS = {
    "sqlite": (FOLDER, ()),
    "postgres": (FOLDER / "postgres", ()),
    "ray": (FOLDER / "ray", ()),
    "sqlite with sandboxes": (FOLDER, (FOLDER / "sandboxes",)),
}


def built(folder: Path, components: tuple[Path, ...] = ()) -> list[Tree]:
    """The objects that `kubectl apply -k` would make; no more of kustomize than is used here."""
    what = yaml.safe_load((folder / KUSTOMIZATION).read_text())
    objects: list[Tree] = []
    for name in what.get("resources", ()):
        path = folder / name
        assert path.resolve().is_dir() or folder in path.parents, "kustomize refuses other files"
        objects += built(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    patches = [*what.get("patches", ())]
    for component in components:
        patches += yaml.safe_load((component / KUSTOMIZATION).read_text())["patches"]
    for one in patches:
        target = one["target"]
        (matches,) = (o for o in objects if has_name(o, target["kind"], target["name"]))
        for change in yaml.safe_load(one["patch"]):
            patch(matches, **change)
    return objects


def has_name(one: Tree, kind: str, name: str) -> bool:
    return one["kind"] == kind and one["metadata"]["name"] == name


def patch(tree: Any, op: str, path: str, value: Any) -> None:
    """One operation of RFC 6902; `replace` needs something to replace."""
    *way, last = (part.replace("~1", "/") for part in path.split("/")[1:])
    for part in way:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    if isinstance(tree, list):
        if op == "add":
            assert last == "-"
            tree.append(value)
        else:
            tree[int(last)] = value
    else:
        assert op == "add" or last in tree, path
        tree[last] = value


def pods(objects: list[Tree]) -> Iterator[tuple[str, Tree]]:
    """Each pod template, with the name of what has it."""
    for one in objects:
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        if one["kind"] == "RayCluster":
            yield f"{name}-head", spec["headGroupSpec"]["template"]
            for group in spec["workerGroupSpecs"]:
                yield f"{name}-{group['groupName']}", group["template"]
        elif "template" in spec:
            yield name, spec["template"]


@pytest.mark.parametrize("way", WAYS)
def test_kubernetes_takes_all_objects(kubernetes_python: Path, way: str, tmp_path: Path) -> None:
    objects = built(*WAYS[way])
    templates = [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name}}
        for name, template in pods(objects)
    ]
    plain = [one for one in objects if one["kind"] != "RayCluster"]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([*plain, *templates]))
    check = [kubernetes_python.with_name("kubernetes-validate"), "--strict", tmp_path / "all.yaml"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert len(re.findall(" passed for resource ", said)) == len(plain) + len(templates), said


@pytest.mark.parametrize("way", WAYS)
def test_pods_may_little_and_end_in_time(way: str) -> None:
    folder, components = WAYS[way]
    objects = built(folder, components)
    labels = {name: template["metadata"]["labels"] for name, template in pods(objects)}
    claims = {one["metadata"]["name"] for one in objects if "Claim" in one["kind"]}
    for _, template in pods(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["terminationGracePeriodSeconds"] >= ServerConfig().drain_seconds + 10
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            may = container["securityContext"]
            assert may["readOnlyRootFilesystem"] and not may["allowPrivilegeEscalation"]
            assert may["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
    for one in objects:
        if one["kind"] in ("Service", "PodDisruptionBudget"):
            selected = one["spec"]["selector"]
            selected = selected.get("matchLabels", selected)
            if "ray.io/cluster" not in selected:  # the operator's own label
                assert any(selected.items() <= has.items() for has in labels.values()), one
        if one["kind"] == "HorizontalPodAutoscaler":
            assert one["spec"]["scaleTargetRef"]["name"] in labels


@pytest.mark.parametrize("way", WAYS)
def test_every_flag_and_variable_is_one_of_ours(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = 0
    for _, template in pods(built(*WAYS[way])):
        for container in template["spec"]["containers"]:
            if container["image"] == "envserver":
                read(container["args"], container["env"], monkeypatch)
                ours += 1
    if WAYS[way][0].name == "ray":
        (words,) = re.findall(r"envserver (serve --ray(?:.|\\\n)+?)\n```", README)
        read(shlex.split(words.replace("\\\n", " ")), [], monkeypatch)
    else:
        assert ours == 2


def read(args: list[str], variables: list[Tree], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the settings as the command does; secrets and addresses are made up."""
    made_up = {"url": "postgresql://host/runs", "status.podIP": "10.0.0.1"}
    values: dict[str, str] = {}
    for one in variables:
        source = one.get("valueFrom", {})
        inner = source.get("secretKeyRef", {}).get("key"), source.get("fieldRef", {})
        name = inner[0] or inner[1].get("fieldPath")
        values[one["name"]] = one.get("value") or made_up.get(name, "a-name-of-16-letters")
    spec = COMMANDS[args[0]].load_spec()
    assert spec is not None
    said: list[str] = []
    with monkeypatch.context() as environment:
        for name, value in values.items():
            environment.setenv(name, re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], value))
        spec.read(args[1:], warn=said.append)
    assert not said, said
