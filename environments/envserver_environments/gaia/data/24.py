STOCK = {"bolt": 140, "nut": 95, "washer": 310, "screw": 77}
ORDERS = [("bolt", 30), ("nut", 50), ("washer", 200), ("nut", 60), ("screw", 70), ("washer", 150), ("bolt", 111), ("screw", 7)]


def ship(stock, orders):
    """Every order is shipped whole, or not at all."""
    shipped = 0
    for item, count in orders:
        if stock[item] > count:
            stock[item] -= count
            shipped += count
    return shipped


print(ship(dict(STOCK), ORDERS))
