"""Where agents run: isolated processes on this machine, behind one seam (`pool.WorkerPool`)."""
