"""What other trainers plug in to get rollouts from a server; the README here says how for each."""
