"""Measurements for `apportion profile`: times of the device, the layers and the links of this machine."""
