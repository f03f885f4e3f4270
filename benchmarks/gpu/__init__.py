"""Steps on a device, measured: are they right, how fast are they, and where does the time go?"""
