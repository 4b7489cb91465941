"""Services for all other parts: processes, files, flags, signals, plug-ins. They import no other part."""
