"""Programs of the pipeline: each stage is started as `python -m stages.<name>`."""

import os

# Taken here, since a stage imports for seconds before it asks to end with its parent: one that is
# killed meanwhile leaves another process's id behind.
FIRST_PARENT = os.getppid()
