"""`environments.agent_systems.MHQA_agent.Main --question ...` is `envserver run --env mhqa`."""

from envserver_environments.agent_systems import run

if __name__ == "__main__":
    run("mhqa")
