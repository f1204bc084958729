"""The environments of this server as OpenEnv servers, at /openenv/{environment}."""

from .routes import mount_openenv

__all__ = ["mount_openenv"]
