"""Runs agents in isolated processes on this machine, behind one interface (`pool.WorkerPool`)."""
