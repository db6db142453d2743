"""What the kernel says of a process. Both raise OSError for one that has ended."""

import os
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """Its memory that is there."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int | str = "self") -> float:
    """User and system time that it has taken so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
