"""Ranks start, talk, end, and never outlive those who started them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from bo_tuner.errors import LaunchError
from bo_tuner.objectives.launch import ForkServer, RankGroup

TARGETS = Path(__file__).parents[2] / "targets"


@pytest.fixture(scope="module")
def light_server() -> Iterator[ForkServer]:
    """A server that has imported nothing big: it starts in half a second."""
    with ForkServer(preload=[], prepare=None, environment={}) as server:
        server.start()
        yield server


def launch(
    server: ForkServer, name: str, *, n_ranks: int = 2, text: str = "", environment: Mapping[str, str] | None = None
) -> RankGroup:
    spec = server.run_dir / "spec"
    spec.write_text(text, encoding="utf-8")
    return server.launch(
        f"misbehave:{name}",
        spec=spec,
        environments=[{"MARK": f"rank {rank}", **(environment or {})} for rank in range(n_ranks)],
        logs=[server.run_dir / f"{name}{rank}.log" for rank in range(n_ranks)],
    )


def messages(group: RankGroup, n: int) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 60
    while len(found) < n and time.monotonic() < deadline:
        found.update(group.poll(0.1))
    assert len(found) == n
    return found


def wait_until_gone(pids: list[int], *, within_s: float) -> float:
    started = time.monotonic()
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() - started < within_s, f"{pids} live on"
        time.sleep(0.02)
    return time.monotonic() - started


def test_each_rank_has_its_environment_its_log_and_only_its_own_socket(light_server: ForkServer) -> None:
    group = launch(light_server, "environment", text="the spec")
    told = messages(group, 2)
    while not group.is_gone:
        group.poll(0.1)
    group.kill()
    assert [told[rank]["mark"] for rank in (0, 1)] == ["rank 0", "rank 1"]
    assert told[0]["spec"] == "the spec"
    assert told[0]["n_sockets"] == told[1]["n_sockets"] == 1
    assert "rank 1 was here" in (light_server.run_dir / "environment1.log").read_text()
    assert group.exit_codes == {0: 0, 1: 0}


def test_a_rank_is_the_first_to_go_when_memory_runs_out_and_has_its_own_folder_for_temporary_files(
    light_server: ForkServer, tmp_path: Path
) -> None:
    group = launch(light_server, "surroundings", n_ranks=1, environment={"TMPDIR": str(tmp_path)})
    told = messages(group, 1)
    group.kill()
    assert told[0] == {"oom_score": "1000", "temporary": str(tmp_path)}
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"


def test_what_a_rank_started_in_a_session_of_its_own_ends_with_the_ranks(light_server: ForkServer) -> None:
    group = launch(light_server, "disown")
    told = messages(group, 2)
    group.kill()
    wait_until_gone([told[rank]["pid"] for rank in (0, 1)], within_s=10)


def test_ranks_that_left_their_group_end_with_the_others_and_so_do_their_children(light_server: ForkServer) -> None:
    group = launch(light_server, "leave_group", n_ranks=3)
    told = messages(group, 3)
    group.kill(patience_s=10.0)
    assert set(group.exit_codes.values()) == {-signal.SIGKILL}
    wait_until_gone([message["pid"] for message in told.values()], within_s=10)


def test_a_rank_that_closes_its_channel_is_known_to_have_hung_up(light_server: ForkServer) -> None:
    group = launch(light_server, "hang_up", n_ranks=2)
    deadline = time.monotonic() + 60
    while not group.hung_up and time.monotonic() < deadline:
        group.poll(0.1)
    assert group.hung_up == {0}
    assert group.exit_codes == {}
    group.kill()


def test_ranks_share_a_process_group_of_their_own(light_server: ForkServer) -> None:
    group = launch(light_server, "environment")
    told = messages(group, 2)
    group.kill()
    assert told[0]["group"] == told[1]["group"] == group.pids[0] != os.getpgid(0)


def test_kill_ends_all_ranks_and_says_how(light_server: ForkServer) -> None:
    group = launch(light_server, "sleep")
    messages(group, 2)
    group.kill()
    assert group.exit_codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert not any(psutil.pid_exists(pid) for pid in group.pids)


@pytest.mark.parametrize(("name", "code"), [("raise_error", 1), ("crash", -signal.SIGSEGV)])
def test_the_end_of_a_rank_is_known_by_its_exit_code(light_server: ForkServer, name: str, code: int) -> None:
    group = launch(light_server, name, n_ranks=1)
    deadline = time.monotonic() + 60
    while not group.is_gone and time.monotonic() < deadline:
        group.poll(0.1)
    group.kill()
    assert group.exit_codes == {0: code}


def test_an_error_of_a_rank_is_in_its_log(light_server: ForkServer) -> None:
    group = launch(light_server, "raise_error", n_ranks=1)
    while not group.is_gone:
        group.poll(0.1)
    group.kill()
    assert "RuntimeError: on purpose" in (light_server.run_dir / "raise_error0.log").read_text()


def test_closing_the_server_ends_ranks_server_and_folder() -> None:
    server = ForkServer(preload=[], prepare=None, environment={})
    with server:
        group = launch(server, "sleep")
        messages(group, 2)
        parents = {psutil.Process(pid).ppid() for pid in group.pids}
    group.close()
    assert len(parents) == 1
    wait_until_gone([*group.pids, *parents], within_s=1)
    assert not server.run_dir.exists()


SUPERVISOR = """
import sys
sys.path.insert(0, {targets!r})
from bo_tuner.objectives.launch import ForkServer
server = ForkServer(preload=[], prepare=None, environment={{}})
spec = server.run_dir / "spec"
spec.write_text("")
group = server.launch("misbehave:sleep", spec=spec, environments=[{{}}, {{}}], logs=[spec, spec])
seen = 0
while seen < 2:
    seen += len(group.poll(0.1))
import json, psutil
print(json.dumps({{"pids": group.pids, "server": psutil.Process(group.pids[0]).ppid(), "dir": str(server.run_dir)}}), flush=True)
import time
time.sleep(3600)
"""


@pytest.mark.parametrize("victim", ["supervisor", "server"])
def test_ranks_end_by_themselves_when_those_above_are_killed(victim: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR.format(targets=str(TARGETS))], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        os.kill(process.pid if victim == "supervisor" else told["server"], signal.SIGKILL)
        if victim == "supervisor":
            for _ in range(20):  # as signals may come while the server cleans up because its control socket hung up
                with contextlib.suppress(ProcessLookupError):
                    os.kill(told["server"], signal.SIGTERM)
                time.sleep(0.002)
        wait_until_gone(told["pids"], within_s=5)
        if victim == "supervisor":
            wait_until_gone([told["server"]], within_s=5)
            assert not Path(told["dir"]).exists()
        shutil.rmtree(told["dir"], ignore_errors=True)  # nobody is left to remove it when both were killed
        process.kill()


def test_a_stack_that_cannot_be_imported_is_said_in_one_line() -> None:
    with (
        ForkServer(preload=["no_such_module"], prepare=None, environment={}) as server,
        pytest.raises(LaunchError, match=r"cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ):
        server.start()


def test_a_server_that_died_is_reported(light_server: ForkServer) -> None:
    with ForkServer(preload=[], prepare=None, environment={}) as server:
        group = launch(server, "sleep")
        messages(group, 2)
        os.kill(psutil.Process(group.pids[0]).ppid(), signal.SIGKILL)
        with pytest.raises(LaunchError, match="starts ranks"):
            for _ in range(50):
                group.poll(0.1)
        group.close()


def test_more_ranks_than_one_message_holds_are_refused(light_server: ForkServer) -> None:
    with pytest.raises(LaunchError, match="at most 250 ranks; got 251"):
        launch(light_server, "sleep", n_ranks=251)


def test_a_server_that_started_cuda_runs_ranks_in_fresh_interpreters() -> None:
    with ForkServer(preload=["pretend_cuda"], prepare=None, environment={}) as server:
        with pytest.warns(RuntimeWarning, match="torch has initialised CUDA"):
            server.start()
        group = launch(server, "environment", text="fresh")
        told = messages(group, 2)
        group.kill()
        assert [told[rank]["mark"] for rank in (0, 1)] == ["rank 0", "rank 1"]
        assert told[0]["group"] == told[1]["group"] == group.pids[0]
        group = launch(server, "sleep")
        messages(group, 2)
        group.kill()
        assert group.exit_codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
