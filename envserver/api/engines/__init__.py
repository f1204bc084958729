"""Engines that are registered while the server runs.

book    what the store keeps of them
routes  POST /v1/engines, and what is done with one engine
telling what runners on other machines hear of them
"""
