"""What UCX reads from the environment as it is loaded: import this before ``ucxx`` or ``libucx``. The user's own values win."""

import os

os.environ.setdefault("UCX_LOG_FILE", "stderr")  # standard output is the program's: --json is read there
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # UCXX itself sets some that only GPUs use
