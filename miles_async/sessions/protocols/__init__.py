"""The protocols that agents speak, each read into one record (``exchange.Exchange``) and written by one writer.

No network and no clock but for dates of answers. Another protocol is a request file, an answer file and a route.
"""
