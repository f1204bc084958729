"""Looks at what is on disk: the same routes as a server's, over files, folders and stores."""
