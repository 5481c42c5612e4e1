"""Every fault of the soak, in the order of its table."""

import os
import signal

from soak_faults import Fault, faulty, killed_driver, killed_workers, stopped
from soak_hands import deleted_outputs, driver_alone, everyone, left_behind, suspended, workers_alone
from soak_world import (
    full_disk,
    garbled,
    jumping_clock,
    largest_file,
    lost_stdout,
    merging_at_once,
    read_only_output,
    spoilt_journals,
    truncated,
)

LITTLE_PCT = 100 * 700e6 / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
"""Little more than torch itself needs on a CPU, as a share of this machine's memory."""
DISKS = (full_disk, read_only_output)
"""These mount file systems."""
CPU, GPU = ("cpu",), ("gpu",)
SPOILT_ROW = "one row of the product is 1.5 times too large"
KERNEL = "a candidate's launch"
FAULTS = (
    Fault(name="worker segfaults", how=KERNEL, act=faulty("segfault", "died"), where=CPU),
    Fault(name="worker gets SIGKILL", how=KERNEL, act=faulty("kill", "died"), where=CPU),
    Fault(name="worker exits", how=KERNEL, act=faulty("exit", "died"), where=CPU),
    Fault(name="hang in a kernel", how=f"{KERNEL} sleeps", act=faulty("hang", "timeout"), where=CPU),
    Fault(name="dies at a later launch", how=KERNEL, act=faulty("die_later", "died"), where=CPU),
    Fault(
        name="out of host memory",
        how=f"{KERNEL} allocates until it is stopped",
        act=faulty("eat", "died", f"executor.memory_pct={LITTLE_PCT}", "executor.timeout_s=30"),
        where=CPU,
    ),
    Fault(
        name="allocation refused",
        how=f"{KERNEL} asks for 2^60 floats",
        act=faulty("no_memory", "launch_error"),
        where=CPU,
    ),
    Fault(
        name="wrong result",
        how=SPOILT_ROW,
        act=faulty("spoil_row", "incorrect", "stages.screen.margin_pct=1e6"),  # it reaches the finals
        where=CPU,
    ),
    Fault(name="compiler crashes", how="its process exits", act=faulty("compile_crash", "compile_error"), where=CPU),
    Fault(
        name="compiler hangs",
        how="it sleeps",
        act=faulty("compile_hang", "compile_error", "executor.compile_timeout_s=8"),
        where=CPU,
    ),
    Fault(
        name="illegal address (sticky)",
        how=f"{KERNEL} stores 4 TB away",
        act=faulty("illegal", "launch_error"),
        where=GPU,
    ),
    Fault(name="endless kernel", how=f"{KERNEL} spins", act=faulty("endless", "timeout", paces=(0,)), where=GPU),
    Fault(name="out of GPU memory", how=f"{KERNEL} asks for 40 TB", act=faulty("too_much", "launch_error"), where=GPU),
    Fault(
        name="wrong result",
        how=SPOILT_ROW,
        act=faulty("wrong", "incorrect", "stages.screen.margin_pct=1e6"),
        where=GPU,
    ),
    Fault(name="workers killed from outside", how="SIGKILL at random moments", act=killed_workers),
    Fault(name="driver killed and resumed", how="SIGKILL at random moments, five times", act=killed_driver),
    Fault(name="SIGTERM", how="at a random moment", act=stopped(signal.SIGTERM)),
    Fault(name="SIGINT once", how="at a random moment", act=stopped(signal.SIGINT)),
    Fault(name="SIGINT twice", how="at random moments", act=stopped(signal.SIGINT, signal.SIGINT)),
    Fault(name="terminal lost", how="SIGHUP at a random moment", act=stopped(signal.SIGHUP)),
    Fault(name="disk full", how="outputs/ on a tmpfs of 16 to 68 kB", act=full_disk),
    Fault(name="quota", how="RLIMIT_FSIZE of 8 to 60 kB", act=largest_file),
    Fault(name="read-only output", how="remounted before or during a run", act=read_only_output),
    Fault(name="journal truncated", how="at a random byte", act=spoilt_journals(truncated)),
    Fault(name="journal with garbage lines", how="binary, deep, torn and wrong ones", act=spoilt_journals(garbled)),
    Fault(name="runs merging at once", how="four into one table", act=merging_at_once),
    Fault(name="clock jump", how="libc's wall clock, up to 400 days", act=jumping_clock),
    Fault(name="put to sleep", how="SIGSTOP to all of a run, 0 to 8 s", act=suspended(everyone, 0, 8)),
    Fault(name="driver put to sleep", how="SIGSTOP, 0 to 8 s", act=suspended(driver_alone, 0, 8)),
    Fault(name="workers put to sleep", how="SIGSTOP, 0 to 1 s", act=suspended(workers_alone, 0, 1)),
    Fault(name="output deleted", how="rm -rf of outputs/, or a folder in it, under a run", act=deleted_outputs),
    Fault(name="left behind", how="locks, halves of files, zeros, of a machine that crashed", act=left_behind),
    Fault(name="lost stdout", how="the pipe is closed after 0 to 2 lines", act=lost_stdout),
)
