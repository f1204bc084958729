"""`environments.agent_systems.TAU_agent.Main --question ...` is `envserver run --env tau`."""

from envserver_environments.agent_systems import run

if __name__ == "__main__":
    run("tau")
