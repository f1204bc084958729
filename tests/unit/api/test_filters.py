"""What a trainer's filters do with groups that others post, and what it is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.api import ENVIRONMENT, REGISTRATION, Api, mark_of, running_api, wire_group


async def started(api: Api, *names: str) -> list[int]:
    """Registers a trainer, which asks for a batch, and environments; returns their numbers."""
    await api.post("/register", REGISTRATION)
    await api.get("/batch")
    found = [await api.post("/register-env", ENVIRONMENT | {"desired_name": n}) for n in names]
    return [one["env_id"] for one in found]


async def lease(api: Api, **limits: Any) -> list[int]:
    answer = await api.http.post("/v1/runs/native/lease", json={"max_groups": 100} | limits)
    if answer.status_code == 204:
        return []
    return [mark_of(group["group"]) for group in answer.json()["groups"]]


async def test_an_environment_keeps_its_name_when_it_registers_again(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        await api.http.post("/v1/runs", json={"name": "native", "environments": ["beta"]})
        [alpha, beta, again] = await started(api, "alpha", "beta", "beta")
        for mark, env_id in enumerate((alpha, beta, again)):
            await api.post("/scored_data", wire_group(mark=mark, env_id=env_id))
        assert await lease(api) == [1, 2]
        assert (await api.get("/v1/status"))["atropos"]["environments"][2]["name"] == "beta_1"


async def test_a_name_that_no_filter_can_have_is_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        await started(api, "x" * 256)
        for path, body in (
            ("/register-env", ENVIRONMENT | {"desired_name": "x" * 257}),
            ("/register", REGISTRATION | {"checkpoint_dir": "x" * 5000}),
        ):
            assert (await api.http.post(path, json=body)).status_code == 422


async def test_a_filter_that_matches_nothing_known_says_so(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        wanted = {"name": "native", "environments": ["alpha", "betta"]}
        await started(api, "alpha", "beta")
        created = await api.http.post("/v1/runs", json=wanted)
        said = "No environment is called 'betta' so far; known: alpha, beta."
        assert (created.status_code, created.json()["warnings"]) == (201, [said])
        assert created.headers["x-envserver-warning"] == said
        resumed = await api.http.post("/v1/runs", json=wanted | {"environments": ["beta"]})
        assert (resumed.status_code, resumed.json()["warnings"]) == (200, [])
        assert "x-envserver-warning" not in resumed.headers
        nothing = await api.http.post("/v1/runs/native/lease", json={"environments": ["gamma"]})
        assert nothing.status_code == 204
        assert "'gamma'" in nothing.headers["x-envserver-warning"]


async def test_a_warning_with_any_names_is_a_valid_header(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        await started(api, "a\r\nset-cookie: b", "\x00é")
        names = ["\u2028", *(f"{number:03}{'x' * 250}" for number in range(200))]
        created = await api.http.post("/v1/runs", json={"name": "native", "environments": names})
        assert created.status_code == 201
        assert "set-cookie" not in created.headers
        assert len(created.headers["x-envserver-warning"]) <= 1000


async def test_posted_groups_are_as_old_as_their_arrival_or_what_they_say(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        await api.http.post("/v1/runs", json={"name": "native"})
        await api.post("/scored_data", wire_group(mark=0))
        for version in (1, 2, 3, 4):
            await api.post("/v1/policy-version", {"version": version})
            await api.post("/scored_data", wire_group(mark=version))
        old: dict[str, Any] = {"group_overrides": {"policy_version": 2}}
        await api.post("/scored_data_list", [wire_group(mark=5, **old), wire_group(mark=6)])
        for wrong in (-1, 2**31, "2", True):
            group = wire_group() | {"group_overrides": {"policy_version": wrong}}
            refused = await api.http.post("/scored_data", json=group)
            assert refused.status_code == 422
            place = ["body", "group_overrides", "policy_version"]
            assert refused.json()["detail"][0]["loc"] == place
        # The first arrived before any version: it has no age.
        assert await lease(api, max_staleness=1) == [0, 3, 4, 6]
        assert await lease(api, min_version=2) == [2, 5]


async def test_a_limit_of_staleness_without_versions_says_that_it_does_nothing(
    tmp_path: Path,
) -> None:
    async with running_api(tmp_path / "store.db") as api:
        await api.http.post("/v1/runs", json={"name": "native"})
        await api.post("/scored_data", wire_group())
        wanted = {"max_staleness": 1}
        leased = await api.http.post("/v1/runs/native/lease", json=wanted)
        assert leased.status_code == 200
        assert "no policy version is published" in leased.headers["x-envserver-warning"]
        await api.post("/v1/policy-version", {"version": 0})
        leased = await api.http.post("/v1/runs/native/lease", json=wanted)
        assert "x-envserver-warning" not in leased.headers
