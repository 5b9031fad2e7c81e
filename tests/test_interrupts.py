"""Being told to end, at any moment of a command."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pagedgen.interrupts import ONE_REQUEST, Interrupts


@pytest.mark.parametrize("delay", [0.05, 0.3, 0.6, 1.2])
def test_an_interrupt_while_things_are_imported_is_one_line(tmp_path, delay):
    (tmp_path / "in.jsonl").write_text('{"prompt": "fox"}\n')
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "pagedgen", "run", "in.jsonl"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "pagedgen.entry" not in process.stderr.readline():  # before, the interpreter itself is starting
        pass
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    assert process.returncode == 130
    assert "interrupted" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_raises_and_the_handlers_are_put_back(number):
    before = signal.getsignal(number)

    def told() -> None:
        with Interrupts("bye"):
            os.kill(os.getpid(), number)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        told()
    assert signal.getsignal(number) is before


def test_a_signal_in_a_deferred_block_raises_at_its_end():
    done = []

    def told() -> None:
        with Interrupts("bye") as interrupts:
            with interrupts.deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
                done.append("inside")
            done.append("after")

    with pytest.raises(KeyboardInterrupt):
        told()
    assert done == ["inside"]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_come_together_are_one_request(first):
    """As of `timeout`, which tells its child, and then the child's whole group."""
    done = []

    def told() -> None:
        with Interrupts("bye") as interrupts:
            try:
                os.kill(os.getpid(), first)
                time.sleep(1)
            finally:
                with interrupts.deferred():
                    time.sleep(0.001)
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.01)
                    done.append("written")

    with pytest.raises(KeyboardInterrupt):
        told()
    assert done == ["written"]


def test_a_second_signal_later_ends_the_process_at_once():
    code = (
        "import os, signal, time\n"
        "from pagedgen.interrupts import Interrupts\n"
        "with Interrupts('see you') as interrupts:\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n"
        f"        time.sleep({ONE_REQUEST})\n"
        "        with interrupts.deferred():\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(5)\n"
        "            print('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\npagedgen: see you\n")


def test_another_thread_changes_no_handlers():
    code = (
        "import signal, threading\n"
        "from pagedgen.interrupts import Interrupts\n"
        "before = signal.getsignal(signal.SIGTERM)\n"
        "def work():\n"
        "    with Interrupts('x') as interrupts, interrupts.deferred():\n"
        "        assert signal.getsignal(signal.SIGTERM) is before\n"
        "        print('worked')\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "worked\n"
