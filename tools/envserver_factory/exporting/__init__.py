"""`envserver export`: chooses stored rollouts and writes them in other forms (`formats`)."""
