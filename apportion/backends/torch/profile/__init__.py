"""`apportion profile`: what the device, the layers and the links of this machine take."""
