"""A server whose disk is full: trainers empty it, posts are refused, and it says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.waiting import PATIENCE

_DRAIN = textwrap.dedent(
    """
    import asyncio, random, sys
    from pathlib import Path

    import httpx
    import orjson

    from envserver.running.api_serving import api_serving
    from envserver.running.run_settings import RunApiSettings

    disk = Path(sys.argv[1])
    settings = RunApiSettings.model_validate(
        {"store": str(disk / "store.db"), "server": {"port": 0}}
    )

    def post():
        rows = [random.choices(range(10**8, 10**9), k=4_000) for _ in range(4)]
        return orjson.dumps({"tokens": rows, "masks": rows, "scores": [0, 1, 0, 1]})

    async def fill(http):
        accepted = 0
        while True:
            answers = await asyncio.gather(*[http.post("/scored_data", content=post())
                                             for _ in range(8)])
            accepted += sum(answer.status_code == 200 for answer in answers)
            full = [answer for answer in answers if answer.status_code != 200]
            if full:
                assert {answer.status_code for answer in full} == {507}, full
                later = await http.post("/scored_data", content=post())
                assert later.status_code == 507, later.text
                assert "leases and acks go on" in later.json()["detail"]
                return accepted

    async def disk_part(http):
        ready = await http.get("/readyz")
        assert ready.status_code == 200, ready.text
        return ready.json()["status"], ready.json()["parts"]["disk"]["state"]

    async def lease(http):
        answer = await http.post("/v1/runs/late/lease", json={"max_groups": 32})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def end(http, found, how):
        body = {"lease_id": found["lease_id"]}
        answer = await http.post(f"/v1/runs/late/{how}", json=body)
        assert answer.is_success, answer.text

    async def main():
        drained = 0
        async with api_serving(settings) as url, httpx.AsyncClient(base_url=url) as http:
            assert await disk_part(http) == ("ok", "ready")
            (disk / "ballast").write_bytes(bytes(75_000_000))
            accepted = await fill(http)
            assert await disk_part(http) == ("limited", "limited")
            metrics = (await http.get("/metrics")).text
            assert 'envserver_part_ready{part="disk"} 0.0' in metrics
            created = await http.post("/v1/runs", json={"name": "late", "batch_size": 4})
            assert created.status_code == 201, created.text
            await end(http, await lease(http), "nack")
            for _ in range(3):
                found = await lease(http)
                drained += len(found["groups"])
                await end(http, found, "ack")
        # A restart changes nothing: the disk is still full.
        async with api_serving(settings) as url, httpx.AsyncClient(base_url=url) as http:
            accepted += await fill(http)
            assert (await disk_part(http))[1] == "limited"
            while drained < accepted / 2:
                found = await lease(http)
                drained += len(found["groups"])
                await end(http, found, "ack")
            # Retention removes what was acknowledged, and new groups take its place.
            while (await http.post("/scored_data", content=post())).status_code == 507:
                await asyncio.sleep(0.2)
            assert (await disk_part(http))[1] == "limited"
            (disk / "ballast").unlink()
            while (await disk_part(http))[1] == "limited":
                await asyncio.sleep(0.2)
        print("drained", drained)

    asyncio.run(main())
    """
)


@pytest.mark.thorough
def test_a_full_disk_is_drained_and_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=128m tmpfs {disk}"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mount]).returncode:
        pytest.skip("A small disk: needs user namespaces that may mount tmpfs")
    done = subprocess.run(
        [*inside, f'{mount}; exec "$0" -c "$1" "$2"', sys.executable, _DRAIN, str(disk)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith("drained ")
