"""Start: how does every Python that the tests start look for garbage less often?

`tests/conftest.py` puts this folder into `PYTHONPATH`. A process that imports jax makes
hundreds of thousands of objects that stay; to look for garbage among them as often as
usual takes a tenth of the time of its start.
"""

import gc

gc.set_threshold(100_000, 50, 50)
