"""What measures genba alone: limits, workloads, and the node and the databases they need."""

import sys
from pathlib import Path

# tests.support has the throw-away PostgreSQL server; last, so that nothing is hidden.
sys.path.append(str(Path(__file__).parents[2]))
