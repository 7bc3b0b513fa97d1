"""The app: explain, audit and compare in a browser, or from a program through JSON; reports that need no server."""
