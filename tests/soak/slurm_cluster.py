"""A SLURM cluster of this machine alone, for tests: its own keys, ports, state and nodes under one folder.

`python tests/soak/slurm_cluster.py FOLDER [NODES]` starts one by hand, says what to export, and ends it at Ctrl-C.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
_CONF = """\
ClusterName=small
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={first_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cores} State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_ANSWER_S = 20.0


def missing() -> str:
    """Why no cluster can be started here, or nothing."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"no SLURM here: {', '.join(absent)} not installed" if absent else ""


@dataclass(kw_only=True)
class SlurmCluster:
    """A controller and some nodes, which are processes of this machine; ends with `close`."""

    folder: Path
    """Short: names of sockets are."""
    nodes: int = 2
    _daemons: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = _free_ports(1 + self.nodes)
        host = socket.gethostname().partition(".")[0]
        text = _CONF.format(
            host=host,
            user=getpass.getuser(),
            folder=self.folder,
            nodes=self.nodes,
            first_port=first,
            ports=f"{first + 1}-{first + self.nodes}",
            cores=os.cpu_count() or 1,
        )
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """The environment by which SLURM's programs find the cluster."""
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def _start(self) -> None:
        at = self.folder
        munge = [f"--{name}={at}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file", "seed-file")]
        self._run(
            "munged", "--foreground", "--force", f"--key-file={at}/munge.key", f"--socket={at}/munge.sock", *munge
        )
        self._wait_for(lambda: (at / "munge.sock").exists(), "munged")
        self._run("slurmctld", "-D", "-c")
        for number in range(1, self.nodes + 1):
            self._run("slurmd", "-D", "-N", f"node{number}")
        self._wait_for(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], "all nodes")

    def _run(self, *arguments: str) -> None:
        with (self.folder / f"{arguments[0]}.out").open("ab") as out:
            environment = {**os.environ, **self.environment}
            daemon = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment, start_new_session=True)
        self._daemons.append(daemon)

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while not ready():
            printed = "".join(path.read_text(errors="replace")[-400:] for path in self.folder.glob("*.out"))
            assert time.monotonic() < deadline, f"{what}: not there within {_ANSWER_S:g} s: {printed}"
            time.sleep(0.1)

    def ask(self, *arguments: str) -> str:
        """The output of one of SLURM's programs."""
        found = subprocess.run(
            arguments, capture_output=True, text=True, env={**os.environ, **self.environment}, timeout=60, check=False
        )
        return found.stdout

    def running(self) -> list[str]:
        """The names of jobs that run, those that are told to end and have not yet among them."""
        return self.ask("squeue", "-h", "-t", "R,CG", "-o", "%i").split()

    def close(self) -> None:
        """Cancel what is left, and end the daemons."""
        self.ask("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
        self.ask("scancel", f"--user={getpass.getuser()}")
        for daemon in reversed(self._daemons):  # the nodes first, which end their steps
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=3)
            except subprocess.TimeoutExpired:
                daemon.send_signal(signal.SIGKILL)
                daemon.wait()
        for process in Path("/proc").glob("[0-9]*"):  # steps whose node went before it could end them
            with contextlib.suppress(OSError):
                mine = f"SLURM_CONF={self.folder}/".encode() in (process / "environ").read_bytes()
                if mine and (process / "comm").read_text().strip() == "slurmstepd":
                    os.kill(int(process.name), signal.SIGKILL)


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(26_800 + os.getpid() % 2_000, 32_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


if __name__ == "__main__":
    assert not missing(), missing()
    here = Path(sys.argv[1])
    here.mkdir(parents=True)
    cluster = SlurmCluster(folder=here.resolve(), nodes=int(sys.argv[2]) if len(sys.argv) > 2 else 2)
    print(f"export SLURM_CONF={here.resolve()}/slurm.conf", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has its background ignore the first
        signal.signal(number, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        cluster.close()
