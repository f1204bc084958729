"""The shape of the data of tau2-bench's domain `airline` (src/tau2/domains/airline/data_model.py).

Names and order of the fields are upstream's: results and hashes are made of them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FlightType = Literal["round_trip", "one_way"]
CabinClass = Literal["business", "economy", "basic_economy"]
Insurance = Literal["yes", "no"]


class Name(BaseModel):
    """The name of a person."""

    first_name: str
    last_name: str


class Address(BaseModel):
    """The address of a person."""

    address1: str
    address2: str | None = None
    city: str
    country: str
    state: str
    zip: str


class Payment(BaseModel):
    """Whole dollars that went one way or, where negative, the other."""

    payment_id: str = Field(description="Id of the payment method")
    amount: int = Field(description="Dollars")


class CreditCard(BaseModel):
    """A way to pay."""

    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str


class GiftCard(BaseModel):
    """A way to pay that has a balance."""

    source: Literal["gift_card"]
    id: str
    amount: float


class Certificate(BaseModel):
    """A way to pay that can be used once."""

    source: Literal["certificate"]
    id: str
    amount: float


class Passenger(BaseModel):
    """Somebody who flies."""

    first_name: str = Field(description="First name of the passenger")
    last_name: str = Field(description="Last name of the passenger")
    dob: str = Field(description="Date of birth as YYYY-MM-DD")


class FlightDateStatusAvailable(BaseModel):
    """A flight on a day for which there are tickets."""

    status: Literal["available"]
    available_seats: dict[CabinClass, int]
    prices: dict[CabinClass, int]


class FlightDateStatusLanded(BaseModel):
    """A flight that is over."""

    status: Literal["landed"]
    actual_departure_time_est: str
    actual_arrival_time_est: str


class FlightDateStatusCancelled(BaseModel):
    """A flight that does not take place."""

    status: Literal["cancelled"]


class FlightDateStatusDelayed(BaseModel):
    """A flight that will leave late."""

    status: Literal["delayed"]
    estimated_departure_time_est: str
    estimated_arrival_time_est: str


class FlightDataStatusFlying(BaseModel):
    """A flight in the air."""

    status: Literal["flying"]
    actual_departure_time_est: str
    estimated_arrival_time_est: str


class FlightDataStatusOnTime(BaseModel):
    """A flight that will leave on time."""

    status: Literal["on time"]
    estimated_departure_time_est: str
    estimated_arrival_time_est: str


class Flight(BaseModel):
    """A flight number with its state on each day."""

    flight_number: str
    origin: str
    destination: str
    scheduled_departure_time_est: str
    scheduled_arrival_time_est: str
    dates: dict[
        str,
        FlightDateStatusAvailable
        | FlightDateStatusLanded
        | FlightDateStatusCancelled
        | FlightDateStatusDelayed
        | FlightDataStatusFlying
        | FlightDataStatusOnTime,
    ]


class ReservationFlight(BaseModel):
    """A part of a journey."""

    flight_number: str
    origin: str
    destination: str
    date: str
    price: int


class FlightInfo(BaseModel):
    """A flight on a day, as the assistant names it."""

    flight_number: str = Field(description="Number of the flight, such as 'HAT001'.")
    date: str = Field(description="Its date as 'YYYY-MM-DD', such as '2024-05-01'.")


class User(BaseModel):
    """A customer."""

    user_id: str
    name: Name
    address: Address
    email: str
    dob: str
    payment_methods: dict[str, CreditCard | GiftCard | Certificate]
    saved_passengers: list[Passenger]
    membership: Literal["gold", "silver", "regular"]
    reservations: list[str]


class Reservation(BaseModel):
    """A journey that was booked."""

    reservation_id: str
    user_id: str
    origin: str
    destination: str
    flight_type: FlightType
    cabin: CabinClass
    flights: list[ReservationFlight]
    passengers: list[Passenger]
    payment_history: list[Payment]
    created_at: str
    total_baggages: int
    nonfree_baggages: int
    insurance: Insurance
    status: Literal["cancelled"] | None = None


class FlightDB(BaseModel):
    """The airline's data."""

    model_config = ConfigDict(extra="forbid")

    flights: dict[str, Flight]
    users: dict[str, User]
    reservations: dict[str, Reservation]
