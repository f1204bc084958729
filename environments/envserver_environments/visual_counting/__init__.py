"""Visual counting: pictures are drawn by the server, their counts are hidden."""
