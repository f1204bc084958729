"""Before anything is imported: what trackio keeps goes where nobody looks for it later."""

from __future__ import annotations

import os
import tempfile

# It reads this when it is imported, and others import it, too.
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")
