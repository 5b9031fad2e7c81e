"""How the command line sets its process up, each case in a process of its own, for it cannot be undone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
REPORT = """
import sys
from pagedgen.process import prepare_process
assert "torch" not in sys.modules
prepare_process()
assert "torch" not in sys.modules
import os, re
import torch
print(os.environ.get("GOMP_SPINCOUNT"), os.environ["THP_MEM_ALLOC_ENABLE"])
small = [torch.ones(512, 512) for _ in range(64)]  # 1 MiB each, below what torch asks for huge pages for
large = torch.ones(16, 1024, 1024)
def asked(address):
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.M)[1:]:
        begin, end = (int(x, 16) for x in part.split()[0].split("-"))
        if begin <= address < end:
            return " hg" in part[part.index("VmFlags"):]
    return None
print(sum(asked(x.data_ptr()) for x in small), asked(large.data_ptr() + large.nbytes // 2))
"""


def report(**environment: str) -> list[str]:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", REPORT]
    done = subprocess.run(command, capture_output=True, text=True, env=clean | environment, check=True)
    return done.stdout.split()


@pytest.mark.skipif(
    not HUGE_PAGES.is_file() or not os.confstr("CS_GNU_LIBC_VERSION") or "[never]" in HUGE_PAGES.read_text(),
    reason="this system has no huge pages to ask for",
)
def test_small_and_large_tensors_lie_where_huge_pages_were_asked_for() -> None:
    assert report() == ["5000", "1", "64", "True"]


def test_what_the_user_has_set_stays() -> None:
    assert report(OMP_WAIT_POLICY="active", THP_MEM_ALLOC_ENABLE="0")[:3] == ["None", "0", "0"]
    assert report(GOMP_SPINCOUNT="7")[0] == "7"
