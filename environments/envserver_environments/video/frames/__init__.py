"""Frames of video files: chosen, decoded in a confined process, remembered."""
