"""Every test sees eight simulated CPU devices, and rank promotion is an error."""

import atexit
import ctypes
import gc
import os
import signal

# The last act of a worker of pytest-xdist, whose results are with its master by then: to take apart
# all that JAX keeps would take seconds.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)

import hypothesis
import jax
import pytest

from shardwise_book import compiler

# XLA reads its flags when it starts: before anything asks for a device.
os.environ["XLA_FLAGS"] = f"{compiler.flags()} {os.environ.get('XLA_FLAGS', '')}"

pytest_plugins = ["browser"]

# Who runs the tests in the background, or by nohup, has these ignored, and so would the programs
# that tests start and interrupt.
for ignored in signal.SIGINT, signal.SIGQUIT, signal.SIGHUP:
    if signal.getsignal(ignored) == signal.SIG_IGN:
        default = signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL
        signal.signal(ignored, default)

# JAX keeps what it traced: millions of objects, which the collector would go through again and
# again, a tenth of the tests' time. What is imported, below, it never looks at again.
gc.set_threshold(20_000, 50, 100)

# Before anything asks for a device: afterwards JAX refuses another number.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow, and a test that fails must fail again for the next.
hypothesis.settings.register_profile("shardwise", deadline=None, derandomize=True)
hypothesis.settings.load_profile("shardwise")


libc = ctypes.CDLL(None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """As many as cores; of all tests one more, since some wait for processes that they started."""
    return os.cpu_count() + (config.option.markexpr != "not slow")


# Begun last, they would go on alone.
LONGEST = """test_run_processes test_layouts test_site test_run_layouts test_pipeline_layouts
test_oracle test_exact test_pipeline test_temporaries test_explicit test_foreign test_layouts_asked
test_accessibility test_launch_processes test_topology""".split()


def pytest_collection_modifyitems(items):
    """The files that take longest come first, and the others as they were."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


# Compiled programs stay in memory as long as JAX keeps them.
LARGEST_GROWTH = 2**29
forgotten = 0


def resident():
    """Bytes of memory that this process holds; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def pytest_runtest_teardown(item, nextitem):
    """A process that has grown forgets its programs, and gives their memory back."""
    global forgotten
    if resident() > forgotten + LARGEST_GROWTH:
        jax.clear_caches()
        gc.collect()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        forgotten = resident()
