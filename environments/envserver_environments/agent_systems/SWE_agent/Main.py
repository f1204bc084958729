"""`environments.agent_systems.SWE_agent.Main --question ...` is `envserver run --env swe`."""

from envserver_environments.agent_systems import run

if __name__ == "__main__":
    run("swe")
