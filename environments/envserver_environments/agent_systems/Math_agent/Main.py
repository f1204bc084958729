"""`environments.agent_systems.Math_agent.Main --question ...` is `envserver run --env math`."""

from envserver_environments.agent_systems import run

if __name__ == "__main__":
    run("math")
