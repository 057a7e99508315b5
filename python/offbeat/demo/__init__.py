"""The demo: real models trained on one machine by a server and unequal workers, beside a single process."""
