"""An OpenEnv server as a sidecar of a worker: it is killed, restarts alone, and the worker goes on."""

from pathlib import Path

from cormorant_client.delivery import decode
from cormorant_testing.real_cluster import PREFIX, ROOT, Installation, build_image
from cormorant_testing.real_job import note, running, small_job

SERVER = ROOT / "tests" / "support" / "cormorant_testing" / "openenv_server.py"
DOCKERFILE = """
FROM python:3.11-slim-bookworm
RUN python -m venv /opt/venv && /opt/venv/bin/pip install --quiet "openenv>=0.10"
COPY openenv_server.py /srv/
# Not the first process, which no signal from inside kills.
CMD ["sh", "-c", "/opt/venv/bin/python /srv/openenv_server.py 8000 4 0.0.0.0; exit 1"]
"""


def test_a_sidecar_that_is_killed_comes_back_alone(installed: Installation, tmp_path: Path) -> None:
    image = f"{PREFIX}/openenv-walk:{installed.images.tag}"
    (tmp_path / SERVER.name).write_text(SERVER.read_text())
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    build_image(image, tmp_path)
    fields = {"observation": [{"name": "total", "dtype": "int64"}], "legalActions": "legal"}
    env = {"openenv": {"image": image, "numEnvs": 2, "fields": fields}}
    manifest = small_job("walk", env, collection={"framesPerBatch": 64})
    with running(installed.jobs, manifest) as job:

        def take() -> None:
            batch = job.take()
            after = decode(memoryview(batch.body)).tensordict()["next"]
            assert after["observation"].squeeze(-1).tolist() == after["reward"].squeeze(-1).long().tolist()
            job.ack(batch)

        take()
        (pod,) = job.pods("worker")
        installed.jobs("exec", pod, "-c", "openenv", "--", "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
        for _ in range(12):  # more than the workers hold ready
            take()
        status = installed.jobs.get("pod", pod)["status"]
        (server,) = status["initContainerStatuses"]
        assert server["restartCount"] == 1
        assert [c["restartCount"] for c in status["containerStatuses"]] == [0]
        assert set(job.pods("worker")) == {pod}
        note(f"frames: {job.ask('/v1/status').json['frames']}")
        job.delete()
