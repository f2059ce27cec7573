import os

# One thread: tiny tensors gain nothing from more, and two OpenMP runtimes fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=100, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
