"""Random numbers of a process whose threads share them."""

import subprocess
import sys

from conftest import environment

THREADS_BESIDE_THE_COLLECTOR = """
import gc, threading, time
from accept_mpi.seeds import seed_all, seeded, state

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0)  # gives up the GIL, as freeing a tensor does

def draw():
    for k in range(3000):
        Cycle()
        with seeded(k):
            state()
            seed_all(k)

gc.set_threshold(1)
threads = [threading.Thread(target=draw) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_seed_beside_the_garbage_collector_go_on() -> None:
    """Torch's ``get_state`` holds the GIL and the generator's lock, and may run the collector with both."""
    subprocess.run([sys.executable, "-c", THREADS_BESIDE_THE_COLLECTOR], env=environment(), check=True, timeout=300)
