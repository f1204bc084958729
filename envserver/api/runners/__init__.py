"""Environments on other machines (`envserver join`), and what they share with those of the server.

`routes` is their HTTP, `registered` knows them, `received` checks their groups, `rooms` and
`sharing` deal out how many groups each may have open, `beside` lets the server's own take part.
"""
