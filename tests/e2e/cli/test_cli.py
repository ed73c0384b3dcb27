"""The command line against a real API server: what it makes, shows, changes and refuses."""

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

from cormorant_contract.children import CODE_ARCHIVE
from cormorant_testing.operator_scene import Cli

# -- submit --------------------------------------------------------------------------------------------------------


def test_submit_makes_changes_finds_unchanged_and_keeps_an_autoscalers_replicas(scene: Cli) -> None:
    name = f"{scene.namespace.name}/pong"
    assert scene.good("submit", scene.write()) == f"{name}: created\n"
    assert scene.good("submit", scene.write()) == f"{name}: unchanged\n"
    assert scene.good("submit", scene.write(replicas=3)) == f"{name}: changed\n"
    assert scene.raw["spec"]["replicas"] == 3
    scene.namespace("scale", "cjob/pong", "--replicas=5")
    done = scene("submit", scene.write())
    assert (done.code, ".spec.replicas" in done.err) == (1, True), done.err
    assert scene.raw["spec"]["replicas"] == 5


def test_code_is_a_config_map_that_is_the_jobs_and_goes_with_it(scene: Cli, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "my_pkg").mkdir(parents=True)
    (code / "my_policies.py").write_text("def make(observation_space, action_space): ...\n")
    (code / "my_pkg" / "__init__.py").write_text("")
    submit = ("submit", scene.write(), "--code", str(code))
    scene.good(*submit)
    name = scene.raw["spec"]["code"]["configMap"]
    made = scene.namespace.get("cm", name)
    assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == [scene.raw["metadata"]["uid"]]
    assert sorted(made["binaryData"]) == ["my_policies.py", CODE_ARCHIVE]
    assert "unchanged" in scene.good(*submit)
    (code / "my_policies.py").write_text("# another\n")
    assert "changed" in scene.good(*submit)
    assert scene.raw["spec"]["code"]["configMap"] != name
    scene.namespace("delete", "cjob", "pong")
    scene.until(lambda: "pong-code" not in scene.namespace("get", "cm"), "its code is gone")
    # That of a job which is created again is kept.
    for _ in range(3):
        scene.good(*submit)
        scene.namespace("delete", "cjob", "pong", "--wait=false")
    scene.good(*submit)
    time.sleep(5)  # the garbage collector's time to do harm
    made = scene.namespace.get("cm", scene.raw["spec"]["code"]["configMap"])
    assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == [scene.raw["metadata"]["uid"]]


# -- kubectl -------------------------------------------------------------------------------------------------------


def test_kubectl_prints_the_columns_of_the_crd(running: Cli) -> None:
    kubectl = running.namespace
    running.stub.frames = 1234
    kubectl.until(lambda: "1234" in kubectl("get", "cjob"), what="frames are shown")
    header, row = kubectl("get", "cjob").splitlines()
    assert header.split() == ["NAME", "PHASE", "REASON", "FRAMES", "TARGET", "FPS", "VERSION", "WORKERS", "AGE"]
    assert row.split()[:7] == ["pong", "Running", "1234", "100000", "10", "0", "2/2"]
    header, row = kubectl("get", "cjob", "-o", "wide").splitlines()
    assert header.split()[-3:] == ["RESTARTS", "APPLIED", "LAST-FRAME"]
    assert row.split()[-1].endswith("s")


def test_kubectl_finds_the_plugin_and_runs_it(scene: Cli, tmp_path: Path) -> None:
    scene.good("submit", scene.write())
    plugin = tmp_path / "bin" / "kubectl-cormorant"
    plugin.parent.mkdir()
    # What the console script of pyproject.toml is, whatever the environment was installed from.
    plugin.write_text(f"#!{sys.executable}\nfrom cormorant_cli.__main__ import kubectl_main\nkubectl_main()\n")
    plugin.chmod(0o755)
    path = {**os.environ, "PATH": f"{plugin.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["kubectl", "cormorant", "pause", "pong", "-n", scene.namespace.name],
        env=path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"{scene.namespace.name}/pong: spec.paused is true; ")
    help_ = subprocess.run(
        ["kubectl", "cormorant", "status", "--help"], env=path, capture_output=True, text=True, timeout=60
    )
    assert "Usage: kubectl cormorant status" in help_.stdout


# -- rights --------------------------------------------------------------------------------------------------------


def become_viewer(scene: Cli) -> None:
    """Run commands as a user who may read jobs and pods, but no Secrets."""
    kubectl = scene.namespace
    kubectl("create", "serviceaccount", "viewer")
    kubectl("create", "role", "viewer", "--verb=get,list", "--resource=collectorjobs.cormorant.dev,pods,events")
    kubectl("create", "rolebinding", "viewer", "--role=viewer", f"--serviceaccount={kubectl.name}:viewer")
    config = yaml.safe_load(kubectl("config", "view", "--minify", "--raw"))
    config["users"][0]["user"] = {"token": kubectl("create", "token", "viewer").strip()}
    path = scene.folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    scene.kubeconfig = str(path)


def test_missing_rights_are_named(running: Cli) -> None:
    become_viewer(running)
    for command, words in (
        (["pause", "pong"], 'cannot patch resource "collectorjobs"'),
        (["status", "pong"], 'cannot get resource "secrets"'),
    ):
        done = running(*command)
        assert (done.code, words in done.err) == (1, True), done.err
    assert "--token-file" in running("status", "pong").err
    found = running("doctor", "pong")
    assert found.code == 0
    assert "cannot check the operator's Deployment" in found.out
    assert "Ready=True, EnoughWorkers" in found.out
